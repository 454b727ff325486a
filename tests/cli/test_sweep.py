"""`ddpforge sweep`: errors, output, and resume of a sweep."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.errors import ExitCode
from ddpforge.tools.sweeps.training import Commands

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "4st", global_batch = 8 }
callbacks.fails = { use = "./fails.py:Fails", at = 9 }
"""
FAILS = """\
from ddpforge.interfaces import Callback

class Fails(Callback):
    def __init__(self, at: int):
        self.at = at

    def on_step(self, info):
        if info.step == self.at:
            raise KeyError("lost")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE)
    Path("fails.py").write_text(FAILS)
    return tmp_path


def sweep(*words: str) -> Result:
    return CliRunner().invoke(main, ["sweep", "tiny.toml", *words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["optimizer.lr=0.1"], "no key has several values in"),
        (["optimizer.lr=0.1,1e9"], "`optimizer.lr` must be at most 1000"),
        (["optimizer.rl=0.1,0.2"], "unknown key `rl`"),
        (["optimizer.lr=1e-4..1e-1"], "draw some: --random N, or --optuna N"),
        (["train.global_batch=8,9", "--nproc=2"], "cannot be divided evenly among 2 ranks"),
        (["train.seed=0,1", "--random=2", "--optuna=2"], "exclude each other"),
        (["train.seed=0,1", "name=mine"], "the runs of a sweep are named by their values"),
        (["name=a,b"], "the runs of a sweep are named by their values"),
        (["train.seed=0,1", "lr"], "Got unexpected extra argument (lr)"),
        (
            ["train.seed=0,1", "--optuna=2", "--metric=eval/reward"],
            "it is unknown whether less of eval/reward is better",
        ),
    ],
)
def test_usage_errors_are_printed_before_training(words: list[str], complaint: str) -> None:
    refused = sweep(*words)
    assert refused.exit_code == ExitCode.USAGE
    assert complaint in refused.stderr
    assert not Path("runs").exists()


def test_a_sweep_inside_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "a sweep starts the processes of its runs" in sweep("train.seed=0,1").stderr


def test_more_concurrent_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    refused = sweep("train.seed=0,1", "--jobs=2", "--nproc=2")
    assert refused.exit_code == ExitCode.USAGE
    assert "2 runs at a time with 2 GPU each need 4, but there are 3" in refused.stderr
    assert "--jobs 1" in refused.stderr


def test_a_sweep_prints_a_table_and_failures_and_repeats_only_failed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains real runs, two at a time; the second sweep repeats only the failed run."""
    first = sweep("optimizer.lr=0.1", "callbacks.fails.at=9,3", "train.device=cpu", "--jobs=2")
    assert first.exit_code == ExitCode.FAILED
    header, *rows = (line.split() for line in first.stdout.splitlines())
    assert header[:4] == ["run", "state", "step", "eval/loss"]
    assert [row[:3] for row in rows] == [["runs/tiny-sweep/at-9", "done", "4/4"]]
    assert "at-3: failed: rank 0: KeyError: 'lost'" in first.stderr
    assert "KeyError: 'lost'" in Path("runs/tiny-sweep/logs/at-3.log").read_text()

    begun: list[str] = []

    def line(_: Commands, variant: object) -> list[str]:
        begun.append(variant.name)  # type: ignore[attr-defined]
        return ["false"]

    monkeypatch.setattr(Commands, "line", line)
    again = sweep("optimizer.lr=0.1", "callbacks.fails.at=9,3", "train.device=cpu", "--json")
    told = json.loads(again.stdout)
    assert begun == ["at-3"]
    assert [Path(run["run"]).name for run in told["runs"]] == ["at-9"]
    assert [run["run"] for run in told["failed"]] == ["at-3"]
    assert told["metric"] == "eval/loss"

    other = sweep("optimizer.lr=0.2", "callbacks.fails.at=9,3", "train.device=cpu")
    assert other.exit_code == ExitCode.USAGE
    assert "runs/tiny-sweep/at-9 is finished, with another recipe" in other.stderr
    assert begun == ["at-3"]
