"""`ddpforge eval`: reproduces the metrics that training reported."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from support.forked import in_ranks
from support.launched import Ranks, Zygote

from ddpforge.app import evaluate as runner
from ddpforge.errors import ExitCode
from ddpforge.runs.checkpoints import choose
from ddpforge.runs.folder import RunFolder

RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "classification", metrics = ["accuracy"] }
optimizer = { use = "adamw", lr = 0.1 }
train = { length = "6st", global_batch = 64, eval_every = "2st" }
checkpoint = { every = "2st", keep = { last = 3, best = 1, monitor = "eval/accuracy" } }
"""


@pytest.fixture(scope="module")
def trained(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains a run of six steps, evaluated and saved every two steps; returns the folder."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "tiny.toml").write_text(RECIPE)
    zygote.run(["run", "tiny.toml"], nproc=2, cwd=folder).check()
    return folder


@pytest.fixture(autouse=True)
def folder(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def reported() -> dict[int, dict[str, float]]:
    """Returns the evaluation metrics that training logged, by step."""
    rows = map(json.loads, Path("runs/tiny/metrics.jsonl").read_text().splitlines())
    return {
        row["step"]: {name: value for name, value in row.items() if name.startswith("eval/")}
        for row in rows
        if "eval/loss" in row
    }


def best() -> int:
    accuracies = {step: metrics["eval/accuracy"] for step, metrics in reported().items()}
    return max(accuracies, key=lambda step: accuracies[step])


def found(ranks: Ranks) -> tuple[int, Any]:
    said = json.loads(ranks.stdout)
    return said.pop("step"), pytest.approx(said, rel=1e-6)


@pytest.mark.parametrize("nproc", [1, 2, 3])  # three do not divide the training batch
def test_any_number_of_ranks_reproduces_the_metrics_of_training(ddpforge: Callable[..., Ranks], nproc: int) -> None:
    step, metrics = found(ddpforge("eval", "tiny", "--json", nproc=nproc))
    assert step == 6
    assert reported()[6] == metrics


def test_a_checkpoint_can_be_chosen(ddpforge: Callable[..., Ranks]) -> None:
    step, metrics = found(ddpforge("eval", "runs/tiny", "--step", "2", "--json"))
    assert step == 2
    assert reported()[2] == metrics

    step, metrics = found(ddpforge("eval", "tiny", "--best", "--json"))
    assert step == best()
    assert reported()[step] == metrics


def test_text_output_is_one_line_with_every_metric(ddpforge: Callable[..., Ranks]) -> None:
    metrics = reported()[6]
    ranks = ddpforge("eval", "tiny")
    said = ranks.stdout
    numbers = f"eval/loss {metrics['eval/loss']:.4g}  eval/accuracy {metrics['eval/accuracy']:.4g}"
    assert said == f"runs/tiny at step 6: {numbers}\n"
    assert "evaluating runs/tiny/checkpoints/step-000000006-" in ranks.stderr
    assert "on 360 samples" in " ".join(ranks.stderr.split())


def test_other_data_can_be_evaluated_and_nothing_is_written(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/*")}
    _, metrics = found(ddpforge("eval", "tiny", "--json", "--set", "data.eval.split=train"))
    assert reported()[6] != metrics
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/**/*")} == before


def test_a_damaged_checkpoint_is_skipped_with_a_warning(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    next(folder.glob("runs/tiny/checkpoints/step-000000006-*/COMMIT")).unlink()
    said = ddpforge("eval", "tiny", "--json", nproc=2)
    assert json.loads(said.stdout)["step"] == 4
    assert "passed over" in said.stderr


def test_a_damaged_checkpoint_chosen_by_step_is_an_error(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    weights = next(folder.glob("runs/tiny/checkpoints/step-000000006-*/shard-00000-*"))
    data = bytearray(weights.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # of the first tensor
    weights.write_bytes(data)

    refused = ddpforge("eval", "tiny", "--step", "6", nproc=2, fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert weights.name in refused.stderr
    assert "Traceback" not in refused.stderr
    assert refused.stdout == ""


# ---------------------------------------------------------------------------------------------- errors
@pytest.mark.parametrize(
    ("arguments", "complaint", "hint"),
    [
        (["tidy"], "there is no run 'tidy'", "did you mean tiny?"),
        (["tiny.toml"], "there is no run 'tiny.toml'", "did you mean tiny?"),
        (["tiny", "--step", "3"], "no checkpoint of step 3", "it has checkpoints of step 2, 4, 6"),
        (["tiny", "--step", "2", "--best"], "--best and --step exclude each other", "give one of them"),
        (["tiny", "--setp", "2"], "No such option '--setp'", "Did you mean"),
    ],
)
def test_usage_errors_are_printed_on_stderr_with_a_hint(
    ddpforge: Callable[..., Ranks], arguments: list[str], complaint: str, hint: str
) -> None:
    result = ddpforge("eval", *arguments, fails=True)
    assert result.codes == [ExitCode.USAGE]
    assert complaint in result.stderr
    assert hint in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_only_rank_0_chooses_the_checkpoint(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Avoids that all ranks read the whole checkpoint to verify it."""

    def noted(*run: Any, **how: Any) -> Path:
        with Path("chose").open("a") as file:
            file.write(os.environ["RANK"])
        return choose(*run, **how)

    monkeypatch.setattr(runner, "choose_checkpoint", noted)
    found = in_ranks(2, lambda rank: runner.evaluate(RunFolder.find("tiny")).step)
    assert (found, Path("chose").read_text()) == ([6, 6], "0")


def test_a_run_without_an_intact_checkpoint_is_a_usage_error(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    for committed in folder.glob("runs/tiny/checkpoints/step-*/COMMIT"):
        committed.unlink()
    result = ddpforge("eval", "tiny", nproc=2, fails=True)
    assert result.codes == [ExitCode.USAGE] * 2
    assert result.stderr.count("runs/tiny has no intact checkpoint") == 1


def test_a_recipe_without_evaluation_data_is_a_usage_error(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    plain = RECIPE.replace('"tiny"', '"plain"').replace(', eval_every = "2st"', "")
    lines = [line for line in plain.splitlines() if not line.startswith(("data.eval", "checkpoint"))]
    Path("plain.toml").write_text("\n".join(lines))
    ddpforge("run", "plain.toml")
    refused = ddpforge("eval", "plain", nproc=2, fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2
    assert refused.stderr.count("the recipe has no evaluation set: add [data.eval]") == 1
