"""`ddpforge run`: what it says, what it leaves behind, how it goes on, and how it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from click.testing import CliRunner, Result
from ranks import Ranks

from ddpforge.cli import main
from ddpforge.errors import ExitCode

RECIPE = """\
recipe = 1
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8 }
track.every = "1st"
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(RECIPE)
    return tmp_path


def status(run: str = "runs/tiny") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(run, "status.json").read_text())
    return found


def steps() -> list[int]:
    return [json.loads(line)["step"] for line in Path("runs/tiny/metrics.jsonl").read_text().splitlines()]


def attempts() -> int:
    found: int = json.loads(Path("runs/tiny/run.json").read_text())["attempts"]
    return found


# ---------------------------------------------------------------------------------------------- going on
def test_a_run_ends_with_one_sentence_and_a_finished_run_is_left_alone(
    ddpforge: Callable[..., Ranks],
) -> None:
    assert ddpforge("run", "tiny.toml").stdout == "runs/tiny: done at step 2\n"

    again = ddpforge("run", "tiny.toml")
    assert again.stdout == "runs/tiny: done at step 2\n"
    assert "--fresh trains it anew" in again.stderr
    assert attempts() == 1


def test_a_longer_run_goes_on_where_it_stood(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    longer = ddpforge("run", "tiny.toml", "--set", "train.length=4st")
    assert longer.stdout == "runs/tiny: done at step 4\n"
    assert 'train.length: "2st" → "4st"' in longer.stderr
    assert (steps(), attempts()) == ([1, 2, 3, 4], 2)


def test_fresh_keeps_the_earlier_run_under_another_name(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    ddpforge("run", "tiny.toml", "--fresh", "--set", "train.length=1st")
    ddpforge("run", "tiny.toml", "--fresh", "--set", "train.length=3st")
    assert [status(f"runs/{name}")["step"] for name in ("tiny.1", "tiny.2", "tiny")] == [2, 1, 3]


def test_a_recipe_that_describes_another_run_is_refused_with_what_changed(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    other = ["run", "tiny.toml", "--set", "train.seed=1", "--set", "model.hidden=[16]", "--set", "train.length=4st"]

    refused = ddpforge(*other, nproc=2, fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2
    assert refused.stdout == ""
    assert "model.hidden: [8] → [16]" in refused.stderr
    assert "train.seed: 0 → 1" in refused.stderr
    assert "--allow-change model.hidden --allow-change train.seed" in refused.stderr.replace("\n" + " " * 9, " ")
    assert refused.stderr.count("no longer describes the run") == 1  # one rank speaks
    assert (steps(), attempts()) == ([1, 2], 1)


def test_a_change_that_is_allowed_takes_effect(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    change = ["--set", "train.seed=1", "--set", "train.length=4st", "--allow-change", "train.seed"]
    ddpforge("run", "tiny.toml", *change)
    assert steps() == [1, 2, 3, 4]
    assert "seed = 1" in Path("runs/tiny/recipe.resolved.toml").read_text()


# ---------------------------------------------------------------------------------------------- output
def test_json_is_the_status_in_one_object(ddpforge: Callable[..., Ranks]) -> None:
    said = ddpforge("run", "tiny.toml", "--json", nproc=2).stdout
    assert json.loads(said) == status()
    assert json.loads(ddpforge("run", "tiny.toml", "--json").stdout) == status()  # also of a finished run


def test_json_has_no_word_for_what_is_not_a_number(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    copy(Path(__file__).parent.parent / "parts.py", folder)
    Path("tiny.toml").write_text(
        """\
recipe = 1
name = "tiny"
model = { use = "./parts.py:Scalars" }
data.train = { use = "./parts.py:Values", values = [1.0, 1.0], nan = 0 }
task = { use = "./parts.py:SumOfLosses" }
optimizer = { use = "sgd", lr = 1.0 }
train = { length = "1st", global_batch = 2, on_nonfinite = "skip" }
"""
    )
    said = json.loads(ddpforge("run", "tiny.toml", "--json").stdout, parse_constant=refuse)
    assert said["metrics"]["train/loss"] is None


def test_out_replaces_the_output_folder(ddpforge: Callable[..., Ranks]) -> None:
    assert ddpforge("run", "tiny.toml", "--out", "some/where").stdout == "some/where/tiny: done at step 2\n"
    assert not Path("runs").exists()


def test_a_run_folder_holds_what_a_run_is(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml", nproc=2)
    assert {path.name for path in Path("runs/tiny").iterdir()} == {
        *("recipe.toml", "recipe.resolved.toml", "env.json", "run.json", "status.json", "metrics.jsonl"),
        *("logs", "checkpoints"),
    }
    assert Path("runs/tiny/recipe.toml").read_text() == RECIPE
    assert {path.name for path in Path("runs/tiny/logs").iterdir()} == {"rank-0.log", "rank-1.log", "lock"}
    assert status() == {
        **status(),
        **{"state": "done", "exit_code": 0, "step": 2, "samples": 16, "world_size": 2, "strategy": "ddp"},
        "error": None,
    }


# ---------------------------------------------------------------------------------------------- refusals
def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["run", *arguments])


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.toml"], "no such recipe: `nowhere.toml`"),
        (["./"], "`./` is a folder, not a recipe"),
        (["digit"], "did you mean `digits`?"),
        (["tiny.toml", "--set", "train.lenght=1ep"], "unknown key `lenght` in [train]"),
        (["tiny.toml", "--set", "train.length"], "train.length"),
        (["tiny.toml", "--out", "tiny.toml"], "is a file"),
        (["tiny.toml", "--frehs"], "Did you mean '--fresh'?"),
        ([], "Missing argument 'RECIPE'"),
    ],
)
def test_mistakes_are_told_on_stderr_before_anything_is_started(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("runs").exists()


@pytest.fixture
def broken(folder: Path) -> Result:
    Path("broken.py").write_text("import math\n\nraise RuntimeError('no licence')\n")
    return invoke("tiny.toml", "--set", "model.use=./broken.py:Model")


def test_local_code_that_fails_when_it_is_imported_is_named_with_its_line(broken: Result) -> None:
    assert "RuntimeError: no licence" in broken.stderr
    assert "broken.py:3" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert broken.stdout == ""


def test_local_code_that_fails_when_it_is_imported_is_found_before_anything_starts(broken: Result) -> None:
    assert broken.exit_code == ExitCode.USAGE


def test_a_file_where_the_folder_should_be_is_an_environment_problem(ddpforge: Callable[..., Ranks]) -> None:
    Path("taken").write_text("")
    refused = ddpforge("run", "tiny.toml", "--out", "taken/below", nproc=2, fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert "taken/below/tiny cannot be written" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_another_folder_of_that_name_is_not_touched(ddpforge: Callable[..., Ranks]) -> None:
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/thesis.tex").write_text("precious")
    for fresh in ([], ["--fresh"]):
        refused = ddpforge("run", "tiny.toml", *fresh, fails=True)
        assert refused.codes == [ExitCode.USAGE]
        assert "exists and is not the folder of a run" in refused.stderr
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["thesis.tex"]


def test_damaged_checkpoints_are_never_trained_over(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    for committed in Path("runs/tiny/checkpoints").glob("step-*/COMMIT"):
        committed.unlink()
    refused = ddpforge("run", "tiny.toml", "--set", "train.length=4st", nproc=2, fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert "COMMIT" in refused.stderr
    assert "Traceback" not in refused.stderr
