"""`ddpforge run`: output, files, resume and errors."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from click.testing import CliRunner, Result
from support import SUPPORT
from support.launched import Ranks

from ddpforge.cli import main
from ddpforge.errors import ExitCode
from ddpforge.launchers.exit_record import LaunchExit

RECIPE = """\
recipe = 2
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


# ---------------------------------------------------------------------------------------------- resume
def test_a_finished_run_prints_its_result_and_is_not_trained_again(
    ddpforge: Callable[..., Ranks],
) -> None:
    first = ddpforge("run", "tiny.toml")
    assert first.stdout == "runs/tiny: done at step 2\n"
    assert first.stderr.endswith("next: ddpforge report runs/tiny, or export\n")  # it has no [data.eval]

    again = ddpforge("run", "tiny.toml")
    assert again.stdout == "runs/tiny: done at step 2\n"
    assert "--fresh trains it from scratch" in again.stderr
    assert attempts() == 1


def test_launch_of_a_finished_run_starts_no_rank(
    ddpforge: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ddpforge("run", "tiny.toml")
    started: list[object] = []
    monkeypatch.setattr(
        "ddpforge.launchers.process.start", lambda *command, **_: started.append(command) or LaunchExit(0)
    )
    told = CliRunner().invoke(main, ["launch", "tiny.toml", "--nproc", "2"])
    assert (told.exit_code, told.stdout, started) == (0, "runs/tiny: done at step 2\n", [])
    assert told.stderr.splitlines() == [
        "runs/tiny is finished; --fresh trains it from scratch, a longer train.length continues it",
        "next: ddpforge report runs/tiny, or export",
    ]
    as_json = CliRunner().invoke(main, ["launch", "tiny.toml", "--nproc", "2", "--json"])
    assert json.loads(as_json.stdout) == status()
    for options in (["train.length=4st"], ["--fresh"], ["--dry-run", "1"]):
        started.clear()
        CliRunner().invoke(main, ["launch", "tiny.toml", "--nproc", "2", *options])
        assert len(started) == 1


def test_a_finished_run_resumes_with_a_longer_length(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    longer = ddpforge("run", "tiny.toml", "--set", "train.length=4st")
    assert longer.stdout == "runs/tiny: done at step 4\n"
    assert 'train.length: "2st" → "4st"' in longer.stderr
    assert (steps(), attempts()) == ([1, 2, 3, 4], 2)


LOCAL = """\
from ddpforge.builtin.models.mlp import MLP

class Mine(MLP):
    pass
"""


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (["--set", "optimizer.lr=0.2"], "optimizer.lr: 0.1 → 0.2"),
        (["--set", "train.seed=1", "--allow-change", "train.seed"], "train.seed: 0 → 1"),
        (["--set", "strategy.use=fsdp"], 'strategy.use: "ddp" → "fsdp"'),
        (["--set", "checkpoint.init_from=elsewhere"], 'checkpoint.init_from: absent → "elsewhere"'),
    ],
)
def test_a_finished_run_refuses_a_changed_recipe(ddpforge: Callable[..., Ranks], change: list[str], named: str) -> None:
    """Prevents that `for lr in 0.1 0.2; do ddpforge run tiny.toml --set optimizer.lr=$lr; done` repeats one result."""
    ddpforge("run", "tiny.toml")
    refused = ddpforge("run", "tiny.toml", *change, nproc=2, fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2
    assert refused.stdout == ""
    assert "runs/tiny is finished, with another recipe" in refused.stderr
    assert named in refused.stderr
    for way in ("another name", "--fresh", "longer train.length"):
        assert way in refused.stderr
    assert (status()["state"], attempts()) == ("done", 1)


def test_json_reports_the_refusal_of_a_changed_recipe(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    refused = ddpforge("run", "tiny.toml", "--json", "--set", "optimizer.lr=0.2", fails=True)
    said = json.loads(refused.stdout)
    assert (said["state"], said["exit_code"]) == ("failed", ExitCode.USAGE)
    assert "is finished, with another recipe" in said["error"]
    assert status()["state"] == "done"


def test_a_finished_run_refuses_edited_local_code(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    Path("tiny.toml").write_text(RECIPE.replace('use = "mlp"', 'use = "./mine.py:Mine"'))
    Path("mine.py").write_text(LOCAL)
    ddpforge("run", "tiny.toml")
    Path("mine.py").write_text(LOCAL + "# another thought\n")
    refused = ddpforge("run", "tiny.toml", fails=True)
    assert refused.codes == [ExitCode.USAGE]
    assert "the code in mine.py" in refused.stderr


def test_a_finished_run_accepts_changes_that_do_not_affect_the_result(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    sets = ["--set", "track.every=2st", "--set", "data.workers=1", "--set", "checkpoint.keep.last=1"]
    again = ddpforge("run", "tiny.toml", *sets, "--set", "train.collective_timeout=1m")
    assert again.stdout == "runs/tiny: done at step 2\n"


@pytest.mark.parametrize("length", ["1st", "0.001ep"])
def test_a_length_before_the_current_step_is_refused(ddpforge: Callable[..., Ranks], length: str) -> None:
    ddpforge("run", "tiny.toml", "--set", "train.length=4st")
    refused = ddpforge("run", "tiny.toml", "--set", f"train.length={length}", nproc=2, fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2
    assert "runs/tiny is at step 4 already, but train.length ends at step 1" in refused.stderr
    assert (status()["state"], status()["step"], attempts()) == ("done", 4, 1)


FAILS = """\
from ddpforge.builtin.datasets.digits import Digits


class Fails(Digits):
    given = 0

    def __getitem__(self, index: int) -> object:
        self.given += 1
        if self.given > 8:
            raise OSError("no such disk")
        return super().__getitem__(index)

    __getitems__ = None
"""


def test_a_run_without_a_checkpoint_accepts_any_new_recipe(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    Path("fails.py").write_text(FAILS)
    Path("broken.toml").write_text(RECIPE.replace('use = "digits"', 'use = "./fails.py:Fails"'))
    ddpforge("run", "broken.toml", "--set", "train.seed=1", fails=True)
    assert status()["state"] == "failed"
    mended = ddpforge("run", "tiny.toml")
    assert "no checkpoint was saved: the new recipe applies from the first step" in mended.stderr
    assert 'fails.py:Fails" → "digits"' in mended.stderr
    assert status()["state"] == "done"
    assert tomllib.loads(Path("runs/tiny/recipe.resolved.toml").read_text())["train"]["seed"] == 0


def test_a_stopped_run_prints_only_its_saved_step(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    """Prints the step of the checkpoint, not of the last logged row."""
    copy(SUPPORT / "parts.py", folder)
    stop = ["--set=callbacks.stop.use=./parts.py:StopAt", "--set=callbacks.stop.step=6", "--set=callbacks.stop.rank=0"]
    said = ddpforge("run", "tiny.toml", *stop, "--set=train.length=90st", "--set=track.every=4st", fails=True)
    assert said.codes == [ExitCode.PREEMPTED]
    assert said.stdout == f"runs/tiny: preempted at step {status()['step']}\n"
    assert set(re.findall(r"at step (\d+)", said.stdout + said.stderr)) == {str(status()["step"])}


def test_fresh_renames_the_earlier_run(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    ddpforge("run", "tiny.toml", "--fresh", "--set", "train.length=1st")
    ddpforge("run", "tiny.toml", "--fresh", "--set", "train.length=3st")
    assert [status(f"runs/{name}")["step"] for name in ("tiny.1", "tiny.2", "tiny")] == [2, 1, 3]


def test_resume_refuses_fixed_changes_and_lists_them(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    other = ["run", "tiny.toml", "--set", "train.seed=1", "--set", "model.hidden=[16]", "--set", "train.length=4st"]

    refused = ddpforge(*other, nproc=2, fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2
    assert refused.stdout == ""
    assert "model.hidden: [8] → [16]" in refused.stderr
    assert "train.seed: 0 → 1" in refused.stderr
    assert "--allow-change model.hidden --allow-change train.seed" in refused.stderr.replace("\n" + " " * 9, " ")
    assert refused.stderr.count("this recipe cannot resume the run") == 1  # only one rank prints it
    assert (steps(), attempts()) == ([1, 2], 1)


def test_an_allowed_change_takes_effect(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    change = ["--set", "train.seed=1", "--set", "train.length=4st", "--allow-change", "train.seed"]
    ddpforge("run", "tiny.toml", *change)
    assert steps() == [1, 2, 3, 4]
    assert "seed = 1" in Path("runs/tiny/recipe.resolved.toml").read_text()


# ---------------------------------------------------------------------------------------------- output
def test_json_prints_the_status_as_one_object(ddpforge: Callable[..., Ranks]) -> None:
    said = ddpforge("run", "tiny.toml", "--json", nproc=2).stdout
    assert json.loads(said) == status()
    assert json.loads(ddpforge("run", "tiny.toml", "--json").stdout) == status()  # also of a finished run


LOUD = """\
from ddpforge.interfaces import Callback

class Loud(Callback):
    def on_start(self, run):
        print("hello from rank", run.world.global_ranks.rank, flush=True)

    def on_step(self, info):
        raise KeyError("lost")
"""


def test_json_prints_one_object_even_if_the_run_fails_and_components_print(
    folder: Path, ddpforge: Callable[..., Ranks]
) -> None:
    Path("loud.py").write_text(LOUD)
    said = ddpforge("run", "tiny.toml", "--json", "--set", "callbacks.loud.use=./loud.py:Loud", nproc=2, fails=True)
    assert json.loads(said.stdout) == status()
    assert (status()["state"], status()["exit_code"]) == ("failed", 1)
    assert "hello from rank 0" in said.stderr


LEAVES = """\
import sys
from ddpforge.interfaces import Callback

class Leaves(Callback):
    def __init__(self, *, at: str):
        self.at = at
        if at == "build":
            sys.exit(0)

    def on_step(self, info):
        sys.exit(0)
"""


@pytest.mark.parametrize("at", ["build", "step"])
def test_sys_exit_in_a_component_is_a_failure(folder: Path, ddpforge: Callable[..., Ranks], at: str) -> None:
    Path("leaves.py").write_text(LEAVES)
    sets = ("--set", "callbacks.leaves.use=./leaves.py:Leaves", "--set", f"callbacks.leaves.at={at}")
    said = ddpforge("run", "tiny.toml", "--json", *sets, fails=True)
    told = json.loads(said.stdout)
    code = ExitCode.ENVIRONMENT if at == "build" else ExitCode.FAILED
    assert (told["state"], told["exit_code"], said.codes) == ("failed", code, [code])
    assert "SystemExit" in told["error"] or "sys.exit(0)" in told["error"]
    assert "leaves.py" in said.stderr  # the file of the call


def test_json_prints_one_object_for_a_recipe_error() -> None:
    result = invoke("tiny.toml", "--json", "--set", "train.lenght=1ep")
    said = json.loads(result.stdout)
    assert (said["state"], said["exit_code"], said["step"]) == ("failed", ExitCode.USAGE, 0)
    assert "unknown key `lenght`" in said["error"]


def test_json_has_null_for_nan(folder: Path, ddpforge: Callable[..., Ranks]) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    copy(SUPPORT / "parts.py", folder)
    Path("tiny.toml").write_text(
        """\
recipe = 2
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


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
    ids=["unset", "set", "set by the older name"],
)
def test_the_allocator_uses_expandable_segments_unless_the_environment_configures_it(
    ddpforge: Callable[..., Ranks], said: dict[str, str], expected: dict[str, str]
) -> None:
    ddpforge("run", "tiny.toml", env=said)
    found = json.loads(Path("runs/tiny/env.json").read_text())["environment"]
    assert {name: value for name, value in found.items() if "ALLOC_CONF" in name} == expected


def test_a_run_folder_has_the_expected_files(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml", nproc=2)
    assert {path.name for path in Path("runs/tiny").iterdir()} == {
        *("recipe.toml", "recipe.resolved.toml", "env.json", "run.json", "status.json", "metrics.jsonl"),
        *("logs", "checkpoints"),
    }
    assert Path("runs/tiny/recipe.toml").read_text() == RECIPE
    assert {path.name for path in Path("runs/tiny/logs").iterdir()} == {
        *("rank-0.log", "rank-1.log", "time-rank-0.jsonl", "time-rank-1.jsonl", "lock")
    }
    assert status() == {
        **status(),
        **{"state": "done", "exit_code": 0, "step": 2, "samples": 16, "world_size": 2, "strategy": "ddp"},
        "error": None,
    }


# ---------------------------------------------------------------------------------------------- errors
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
        ([], "Missing argument 'RECIPE'.\n  = help: ddpforge run digits, or"),
    ],
)
def test_usage_errors_are_printed_on_stderr_before_training(arguments: list[str], complaint: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert result.stdout == ""
    assert complaint in result.stderr
    assert "Traceback" not in result.stderr
    assert not Path("runs").exists()


def test_an_error_in_a_models_forward_is_shown_with_its_line(ddpforge: Callable[..., Ranks]) -> None:
    """Leaves the frames of ddpforge's tracing of the first pass to the log."""
    code = "import torch\n\n\nclass Model(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    code += "        self.head = torch.nn.Linear(5, 10)\n\n    def forward(self, x):\n"
    Path("mine.py").write_text(code + "        return self.head(x.flatten(1))\n")
    said = ddpforge("run", "tiny.toml", 'model={use="./mine.py:Model"}', fails=True).stderr
    assert re.search(r'mine.py", line 10, in forward', said)
    assert "mat1 and mat2 shapes cannot be multiplied (8x64 and 5x10)" in said
    assert "parameter_guard.py" not in said
    assert "parameter_guard.py" in Path("runs/tiny/logs/rank-0.log").read_text()


@pytest.fixture
def broken(folder: Path) -> Result:
    Path("broken.py").write_text("import math\n\nraise RuntimeError('no licence')\n")
    return invoke("tiny.toml", "--set", "model.use=./broken.py:Model")


def test_an_import_error_in_local_code_is_shown_with_its_line(broken: Result) -> None:
    assert "RuntimeError: no licence" in broken.stderr
    assert "broken.py:3" in broken.stderr
    assert "Traceback" not in broken.stderr
    assert broken.stdout == ""


def test_an_import_error_in_local_code_is_a_usage_error(broken: Result) -> None:
    assert broken.exit_code == ExitCode.USAGE


def test_a_file_instead_of_the_output_folder_is_an_environment_error(ddpforge: Callable[..., Ranks]) -> None:
    Path("taken").write_text("")
    refused = ddpforge("run", "tiny.toml", "--out", "taken/below", nproc=2, fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert "cannot write to the folder of runs taken/below" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_a_folder_that_is_not_a_run_is_not_touched(ddpforge: Callable[..., Ranks]) -> None:
    Path("runs/tiny").mkdir(parents=True)
    Path("runs/tiny/thesis.tex").write_text("precious")
    for fresh in ([], ["--fresh"]):
        refused = ddpforge("run", "tiny.toml", *fresh, fails=True)
        assert refused.codes == [ExitCode.USAGE]
        assert "exists and is not the folder of a run" in refused.stderr
    assert [path.name for path in Path("runs/tiny").iterdir()] == ["thesis.tex"]


def test_a_run_with_only_damaged_checkpoints_is_an_error(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "tiny.toml")
    for committed in Path("runs/tiny/checkpoints").glob("step-*/COMMIT"):
        committed.unlink()
    refused = ddpforge("run", "tiny.toml", "--set", "train.length=4st", nproc=2, fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert "COMMIT" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("bit", [0, 77, 300])
def test_a_damaged_status_does_not_stop_a_resume(ddpforge: Callable[..., Ranks], bit: int) -> None:
    ddpforge("run", "tiny.toml", "--set", "checkpoint.every=1st")
    (file := Path("runs/tiny/status.json")).write_bytes(flipped(file.read_bytes(), bit))
    done = ddpforge("run", "tiny.toml", "--set", "train.length=4st", "--set", "checkpoint.every=1st")
    assert done.stdout == "runs/tiny: done at step 4\n"
    assert steps() == [1, 2, 3, 4]


def flipped(content: bytes, bit: int) -> bytes:
    """Returns the content with one bit changed."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)
