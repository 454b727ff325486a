"""`ddpforge eval` under every strategy: the numbers of training, from weights and evaluation data alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
from support import SUPPORT
from support.launched import Ranks, Zygote
from support.sharding import EACH, FSDP, each_strategy

from ddpforge.checkpoint.reader import Reader
from ddpforge.errors import ExitCode

RECIPE = """\
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 4
outputs = 1
hidden = [9]
[data.train]
use = "./parts.py:TrainingPoints"
[data.eval.few]
use = "./parts.py:Points"
samples = 11
[data.eval.many]
use = "./parts.py:Points"
samples = 50
[task]
use = "regression"
[optimizer]
use = "./parts.py:training_adamw"
[schedule]
use = "./parts.py:training_schedule"
[train]
length = "6st"
global_batch = 8
eval_every = "3st"
[checkpoint]
every = "3st"
keep = { last = 9, best = 1, monitor = "eval/many/loss" }
[callbacks.ema]
decay = 0.5
[callbacks.early_stopping]
metric = "eval/few/loss"
patience = 9
[callbacks.hears]
use = "./parts.py:Hears"
"""


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of six steps, evaluated and saved after three and six."""
    folder = tmp_path_factory.mktemp("trained")
    copy(SUPPORT / "parts.py", folder)
    (folder / "run.toml").write_text(RECIPE)
    zygote.run(["run", "run.toml"], nproc=2, cwd=folder).check()
    return folder


@pytest.fixture
def evaluate(trained: Path, tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Callable[..., Ranks]:
    """`evaluate("--step", "3", strategy=…)`: what training needs is gone."""
    copytree(trained, tmp_path, dirs_exist_ok=True)
    for heard in tmp_path.glob("heard-*.txt"):
        heard.unlink()

    def run(*arguments: str, strategy: str = EACH["ddp"], nproc: int = 2, fails: bool = False, **env: str) -> Ranks:
        table = [f"strategy.{line}" for line in strategy.splitlines()]
        sets = [word for line in table for word in ("--set", line)]
        more: dict[str, str] = {"EVALUATES": "1", **env}
        return ddpforge("eval", "run", "--json", *sets, *arguments, nproc=nproc, env=more, fails=fails)

    return run


def reported(folder: Path, step: int = 6) -> dict[str, float]:
    """What training said of its evaluation after a step."""
    rows = map(json.loads, (folder / "runs/run/metrics.jsonl").read_text().splitlines())
    (row,) = (row for row in rows if row["step"] == step and "eval/few/loss" in row)
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def found(ranks: Ranks) -> tuple[int, Any]:
    said = json.loads(ranks.stdout)
    return said.pop("step"), pytest.approx(said, rel=1e-5)


def heard(folder: Path, rank: int = 0) -> list[str]:
    return (folder / f"heard-{rank}.txt").read_text().splitlines()


def test_a_run_tells_the_metrics_of_every_set_everywhere(trained: Path) -> None:
    metrics = reported(trained)
    assert {name.rpartition("/")[0] for name in metrics} == {"eval/few", "eval/many"}
    status = json.loads((trained / "runs/run/status.json").read_text())
    saved = Reader(max((trained / "runs/run/checkpoints").glob("step-*"))).facts.metrics
    for told in (status["metrics"], saved):
        assert {name: value for name, value in told.items() if name.startswith("eval/")} == metrics


@each_strategy
def test_every_strategy_finds_what_training_reported_with_averaged_weights(
    tmp_path: Path, evaluate: Callable[..., Ranks], strategy: str
) -> None:
    """Neither training data nor the recipe's optimizer and schedule can be built here."""
    ranks = evaluate(strategy=strategy)
    step, metrics = found(ranks)
    assert step == 6
    assert reported(tmp_path) == metrics
    assert "with the weights of ema, hears, on 11 samples of few, 50 samples of many" in " ".join(ranks.stderr.split())


def test_ranks_of_an_evaluation_need_no_group_for_checkpoints(
    tmp_path: Path, trained: Path, evaluate: Callable[..., Ranks]
) -> None:
    """Nor do they train: three do not divide the training batch."""
    assert reported(tmp_path, step=3) == found(evaluate("--step", "3", nproc=3))[1]
    assert heard(tmp_path) == ["start in 1 groups", "evaluation", "end: None"]
    assert heard(trained) == ["start in 2 groups", "evaluation", "evaluation", "end: None"]


def test_a_process_alone_finds_the_same(tmp_path: Path, evaluate: Callable[..., Ranks]) -> None:
    assert reported(tmp_path) == found(evaluate(nproc=1))[1]


@pytest.mark.parametrize(
    ("strategy", "nproc", "said"),
    [
        (
            f"{FSDP}\ntensor = 2\nsequence_parallel = true\nreplicas = 2\ncontext = 2\nexperts = 2",
            1,
            "replicas = 2 and strategy.context = 2 and strategy.tensor = 2 and strategy.experts = 2 left out: 1 rank c",
        ),
        (f"{FSDP}\nreplicas = 4", 2, "strategy.replicas = 4 left out: 2 ranks cannot be laid out so"),
        ('use = "pipeline"', 1, "1 rank cannot form the pipeline: each holds the whole model, as under strategy.use ="),
    ],
    ids=["fsdp", "replicas", "pipeline"],
)
def test_fewer_ranks_than_a_layout_needs_evaluate_under_another(
    tmp_path: Path, evaluate: Callable[..., Ranks], strategy: str, nproc: int, said: str
) -> None:
    ranks = evaluate(strategy=strategy, nproc=nproc)
    assert reported(tmp_path) == found(ranks)[1]
    assert said in " ".join(ranks.stderr.split())


def test_one_of_the_sets_may_be_asked_for(tmp_path: Path, evaluate: Callable[..., Ranks]) -> None:
    few = {name: value for name, value in reported(tmp_path).items() if name.startswith("eval/few/")}
    assert few == found(evaluate("--dataset", "few"))[1]

    refused = evaluate("--dataset", "fwe", fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2
    assert refused.stderr.count("the recipe has no [data.eval.fwe] to evaluate on") == 1
    assert "did you mean `few`?" in refused.stderr


def test_the_state_of_the_optimizer_is_not_read(tmp_path: Path, evaluate: Callable[..., Ranks]) -> None:
    """Bytes of it that are damaged go unnoticed; those of weights do not."""
    path = next((tmp_path / "runs/run/checkpoints").glob("step-000000006-*"))
    reader = Reader(path)

    def spoil(section: str, name: str) -> None:
        chunk = reader.manifest.tensors[section][name].chunks[0]  # type: ignore[index]
        begin = reader._open(chunk.file)[chunk.entry]
        data = bytearray((path / chunk.file).read_bytes())
        data[begin] ^= 1
        (path / chunk.file).write_bytes(data)

    for name in reader.names("optimizer"):
        spoil("optimizer", name)
    assert reported(tmp_path) == found(evaluate("--step", "6"))[1]

    spoil("model", reader.names("model")[0])
    refused = evaluate("--step", "6", fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert "Traceback" not in refused.stderr


def test_callbacks_hear_of_an_evaluation_that_fails(tmp_path: Path, evaluate: Callable[..., Ranks]) -> None:
    failed = evaluate(fails=True, FAIL="1")
    assert 0 not in failed.codes
    assert "ValueError: cannot lend weights" in failed.stderr
    for rank in (0, 1):
        assert heard(tmp_path, rank)[1:] == ["evaluation", "end: ValueError('cannot lend weights')"]
