"""Checkpoints of a run: in the background or not, with failing writes, and their retention."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launched import Ranks
from support.sharding import FSDP, Bench, each_strategy, weights_in

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.errors import ExitCode

SAVING = """
[checkpoint]
every = "2st"
keep = {{ last = 100 }}
{more}
[callbacks.disk]
use = "./parts.py:NoDisk"
begin = {begin}
end = {end}
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def saves(bench: Bench, more: str = "", begin: int = 100, end: int = 100, **options: bool) -> Ranks:
    return bench("run", FSDP, length="8st", more=SAVING.format(more=more, begin=begin, end=end), **options)


def steps(bench: Bench, folder: str = "checkpoints") -> list[int]:
    return sorted(CheckpointReader(path).metadata.step for path in (bench.folder / "runs/run" / folder).glob("step-*"))


@pytest.mark.parametrize(
    "background",
    ["true", pytest.param("false", marks=pytest.mark.full)],  # tests/checkpoint/test_manager.py has both
)
def test_every_checkpoint_is_saved_and_training_is_the_same_with_background_saves(
    bench: Bench, background: str
) -> None:
    saves(bench, f"async_save = {background}")
    assert steps(bench) == [2, 4, 6, 8]
    bench("plain", FSDP, length="8st")
    assert bench.column("run") == bench.column("plain")


@pytest.mark.parametrize("background", ["true", "false"])
def test_run_may_continue_without_a_failed_checkpoint(bench: Bench, background: str) -> None:
    """Covers trap 18: no rank hangs, earlier checkpoints are intact, and the next checkpoint is written."""
    said = saves(bench, f'async_save = {background}\non_failure = "continue"', begin=3, end=5)
    assert steps(bench) == [2, 6, 8]
    assert "checkpoint of step 4 could not be written" in said.stderr
    assert "training continues without it" in said.stderr


def test_run_fails_if_a_checkpoint_cannot_be_written(bench: Bench) -> None:
    failed = saves(bench, begin=3, fails=True)
    assert set(failed.codes) == {ExitCode.ENVIRONMENT}
    assert "checkpoint of step 4 could not be written" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert steps(bench, "aside") == [2]


@pytest.mark.parametrize("background", [pytest.param("true", marks=pytest.mark.full), "false"])  # the test above
def test_run_fails_if_the_last_checkpoint_cannot_be_written(bench: Bench, background: str) -> None:
    failed = saves(bench, f'async_save = {background}\non_failure = "continue"', begin=7, fails=True)
    assert set(failed.codes) == {ExitCode.ENVIRONMENT}
    assert json.loads((bench.folder / "runs/run/status.json").read_text())["state"] == "failed"
    assert steps(bench, "aside") == [2, 4, 6]


@each_strategy
def test_full_checkpoint_has_a_whole_model_file_and_resumes(bench: Bench, strategy: str) -> None:
    full = '[checkpoint]\nlayout = "full"\nevery = "100st"\n'
    bench("run", strategy, length="8st", more=full)
    model = load_file(bench.newest("run") / "model.safetensors")
    torch.testing.assert_close(model, weights_in(bench.newest("run")), rtol=0, atol=0)
    bench("run", strategy, length="10st", more=full, nproc=1)
    assert CheckpointReader(bench.newest("run")).metadata.step == 10


def test_milestones_outlive_newer_checkpoints(bench: Bench) -> None:
    keep = '[checkpoint]\nevery = "1st"\nkeep = { last = 1, every = "3st" }'
    bench("run", FSDP, length="8st", more=keep)
    assert steps(bench) == [3, 6, 8]


GONE = """
import shutil
from pathlib import Path
from ddpforge.interfaces import Callback

class Gone(Callback):
    def __init__(self, when: str, what: str = "runs/run"):
        self.when, self.what = when, Path(what)

    def remove(self, *now):
        if now == (self.when, 8):
            shutil.rmtree(self.what) if self.what.is_dir() else self.what.unlink()

    def on_step(self, info):
        self.remove("step", info.step)

    def on_eval(self, step, metrics):
        self.remove("eval", step)

    def on_checkpoint(self, step, folder):
        self.remove("checkpoint", step)
"""


@pytest.mark.parametrize(
    ("when", "said"),
    [
        ("step", "cannot write runs/run/metrics.jsonl: No such file"),
        ("eval", "checkpoint of step 8 could not be written"),
        pytest.param("checkpoint", "cannot write runs/run/metrics.jsonl: No such file", marks=pytest.mark.full),
    ],
)
def test_run_fails_if_its_folder_is_removed(bench: Bench, when: str, said: str) -> None:
    """Covers a removal at the end of the run, too. Errors of status.json must not hide the reason of the failure."""
    (bench.folder / "gone.py").write_text(GONE)
    bench.recipe = bench.recipe.replace('every = "1st"', 'every = "100st"')
    more = f'[checkpoint]\nevery = "100st"\n[callbacks.gone]\nuse = "./gone.py:Gone"\nwhen = "{when}"'
    failed = bench("run", length="8st", more=more, nproc=1, fails=True)
    assert failed.codes == [ExitCode.ENVIRONMENT]
    assert said in failed.stderr
    assert "warning: while the run was ending: runs/run/logs cannot be written" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""


def test_rows_removed_during_training_are_written_again(bench: Bench) -> None:
    (bench.folder / "gone.py").write_text(GONE)
    more = '[callbacks.gone]\nuse = "./gone.py:Gone"\nwhen = "step"\nwhat = "runs/run/metrics.jsonl"'
    said = bench("run", length="8st", more=more, nproc=1)
    assert "runs/run/metrics.jsonl was removed or replaced during training" in said.stderr
    bench("plain", length="8st", nproc=1)
    assert bench.column("run") == bench.column("plain")


def test_checkpoints_removed_during_training_cause_a_warning(bench: Bench) -> None:
    (bench.folder / "gone.py").write_text(GONE)
    more = '[callbacks.gone]\nuse = "./gone.py:Gone"\nwhen = "step"\nwhat = "runs/run/checkpoints"'
    said = bench("run", length="8st", more=f'[checkpoint]\nevery = "2st"\nasync_save = false\n{more}', nproc=1)
    assert said.stderr.count("warning: runs/run/checkpoints does not exist: a new one is created") == 1
    assert steps(bench) == [8]
    bench("plain", length="8st", nproc=1)
    assert "a new one is created" not in bench("plain", length="9st", nproc=1).stderr


def test_unknown_monitor_metric_is_refused(bench: Bench) -> None:
    keep = '[checkpoint]\nkeep = { best = 1, monitor = "eval/acuracy", mode = "max" }'
    refused = bench("run", length="8st", more=keep, fails=True)
    assert set(refused.codes) == {ExitCode.USAGE}
    assert refused.stderr.count("no evaluation reports eval/acuracy") == 1
    assert not (bench.folder / "runs").exists()
