"""Runs of ddpforge 0.4 and 0.5 are resumed, evaluated, exported, compared and reported like runs of this version.

`tests/runs/data/run-0.4` was written by 0.4.0: a GAN with two updates a step, stopped by SIGTERM at step 6 of 12. Most
keys and options of its recipe, the state and a metric have other names now. The numbers here come from 0.4.0, which
continued the run itself.

`tests/runs/data/run-0.5` was written by 0.5.0 on two ranks under FSDP: two layers with local code, a frozen bias, EMA
and virtual ranks, stopped at step 8 of 12 before the evaluation of that step. Its numbers come from 0.5.0, too. Older
checkpoints than these are in `tests/checkpoint/golden`, and older recipes in `tests/recipe/data`.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.launched import Ranks

from ddpforge.cli import main
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import read_metrics

DATA = Path(__file__).parents[1] / "runs/data"
KEPT = DATA / "run-0.4"
EVALUATED = {  # by 0.4, at steps 4 and 12
    4: {"eval/loss": 2.0990142822265625, "eval/loss/generator": 0.7028092741966248},
    12: {"eval/loss": 2.0988162457942963, "eval/loss/generator": 0.7031673789024353},
}


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(KEPT, tmp_path / "runs/old")
    return RunFolder(Path("runs/old"))


def invoke(*arguments: str) -> Result:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def test_older_run_is_read_with_the_new_names(old: RunFolder) -> None:
    tables = old.tables()
    assert tables["optimizer"]["updates"]["discriminator"] == {"parameters": [], "n_updates": 2, "new_batch": True}
    assert tables["data"]["sampler"]["use"] == "reuse_batches"
    assert old.given()["train"]["hang_timeout"] == "5m"
    status = old.status()
    assert status is not None
    assert (status["state"], status["exit_code"]) == ("preempted", 75)
    assert "train/time/optimizer" in status["metrics"]
    assert "train/time/step" not in status["metrics"]
    rows = read_metrics(old.path)
    assert all("train/time/step" not in row for row in rows)
    assert rows[-1]["train/time/optimizer"] == 0.0335


@pytest.mark.parametrize("source", ["old.toml", "runs/old/recipe.resolved.toml"])
def test_resumed_older_run_gives_the_numbers_of_its_own_version(
    old: RunFolder, ddpforge: Callable[..., Ranks], source: str
) -> None:
    shutil.copy(old.recipe, "old.toml")
    invoke("recipes", "upgrade", "old.toml")
    ran = ddpforge("run", source)
    assert "old from step 6" in ran.stderr
    assert "changed since the last attempt" not in ran.stderr
    rows = {row["step"]: row for row in read_metrics(old.path)}
    assert rows[12]["attempt"] == 2
    for step, metrics in EVALUATED.items():
        assert {name: rows[step][name] for name in metrics} == pytest.approx(metrics, rel=1e-6)
    status = old.status()
    assert status is not None
    assert (status["state"], status["step"]) == ("done", 12)
    assert "recipe = 2" in old.resolved.read_text()


def test_checkpoint_of_an_older_run_is_evaluated(old: RunFolder, ddpforge: Callable[..., Ranks]) -> None:
    found = json.loads(ddpforge("eval", "old", "--step", "4", "--json").stdout)
    assert {name: found[name] for name in EVALUATED[4]} == pytest.approx(EVALUATED[4], rel=1e-6)
    best = json.loads(ddpforge("eval", "old", "--best", "--json").stdout)
    assert best["step"] == 4
    assert old.resolved.read_text() == (KEPT / "recipe.resolved.toml").read_text()


def test_older_run_is_exported_compared_listed_and_reported(old: RunFolder) -> None:
    invoke("export", "old", "-o", "old.safetensors")
    assert Path("old.safetensors").stat().st_size > 1000
    shutil.copytree(old.path, "runs/other")
    resolved = Path("runs/other/recipe.resolved.toml")
    resolved.write_text(resolved.read_text().replace("fresh = true", "fresh = false"))
    compared = json.loads(invoke("runs", "compare", "runs/old", "runs/other", "--json").stdout)
    assert compared["recipe"] == {"optimizer.updates.discriminator.new_batch": [True, False]}
    listed = json.loads(invoke("runs", "ls", "--sort", "eval/loss", "--json").stdout)["runs"]
    assert [run["state"] for run in listed] == ["preempted", "preempted"]
    invoke("report", "runs/old", "-o", "report.html")
    assert "optimizer.updates.discriminator.new_batch" in Path("report.html").read_text()
    steps = [str(path) for path in sorted(old.checkpoints.glob("step-*"))]
    same = CliRunner().invoke(main, ["ckpt", "diff", *steps, "--json"])
    assert same.exit_code in (0, 1)
    assert json.loads(same.stdout)["recipe"] == []


@pytest.fixture
def sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(DATA / "run-0.5", tmp_path / "runs/old")
    return RunFolder(Path("runs/old"))


def test_status_and_checkpoints_of_a_run_of_0_5_are_read(sharded: RunFolder) -> None:
    state = json.loads(invoke("status", "old", "--json").stdout)
    assert (state["state"], state["step"], state["total_steps"], state["checkpoint"]["step"]) == ("preempted", 8, 12, 8)
    listed = json.loads(invoke("ckpt", "ls", "old", "--json").stdout)["checkpoints"]
    assert [(one["step"], one["best"]) for one in listed] == [(8, False), (4, True)]


@pytest.mark.parametrize("nproc", [1, 2])
def test_resumed_run_of_0_5_has_the_numbers_of_its_own_version(
    sharded: RunFolder, ddpforge: Callable[..., Ranks], nproc: int
) -> None:
    ddpforge("run", "runs/old/recipe.resolved.toml", nproc=nproc)
    rows = {row["step"]: row for row in read_metrics(sharded.path)}
    assert rows[10]["attempt"] == 2
    expected = {
        8: {"eval/loss": 0.30301803892309015},
        10: {"train/loss": 0.2684646546840668, "train/grad_norm": 0.24496318399906158, "samples": 104},
        12: {"train/loss": 0.3133517149835825, "samples": 120, "eval/loss": 0.29798209125345404},
    }
    for step, metrics in expected.items():
        assert {name: rows[step][name] for name in metrics} == pytest.approx(metrics, rel=1e-6)


def test_checkpoint_of_a_run_of_0_5_is_evaluated_with_its_averaged_weights(
    sharded: RunFolder, ddpforge: Callable[..., Ranks]
) -> None:
    found = json.loads(ddpforge("eval", "old", "--best", "--json").stdout)
    assert found["step"] == 4
    assert found["eval/loss"] == pytest.approx(0.31521746245297516, rel=1e-6)
