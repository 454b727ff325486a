"""What a run does about its checkpoints: in the background or not, when one cannot be written, which it keeps."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.launched import Ranks
from support.sharding import FSDP, Bench, each_strategy, weights_in

from ddpforge.checkpoint.reader import Reader
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
    return sorted(Reader(path).facts.step for path in (bench.folder / "runs/run" / folder).glob("step-*"))


@pytest.mark.parametrize("background", ["true", "false"])
def test_every_checkpoint_is_there_and_the_run_does_not_depend_on_who_writes(bench: Bench, background: str) -> None:
    saves(bench, f"async_save = {background}")
    assert steps(bench) == [2, 4, 6, 8]
    bench("plain", FSDP, length="8st")
    assert bench.column("run") == bench.column("plain")


@pytest.mark.parametrize("background", ["true", "false"])
def test_a_run_that_may_goes_on_without_a_checkpoint(bench: Bench, background: str) -> None:
    """Trap 18: nobody hangs, the earlier ones are intact, and the next that can be written is."""
    said = saves(bench, f'async_save = {background}\non_failure = "continue"', begin=3, end=5)
    assert steps(bench) == [2, 6, 8]
    assert "checkpoint of step 4 could not be written" in said.stderr
    assert "training continues without it" in said.stderr


def test_a_run_stops_when_a_checkpoint_cannot_be_written(bench: Bench) -> None:
    failed = saves(bench, begin=3, fails=True)
    assert set(failed.codes) == {ExitCode.ENVIRONMENT}
    assert "checkpoint of step 4 could not be written" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert steps(bench, "aside") == [2]


@pytest.mark.parametrize("background", ["true", "false"])
def test_the_last_checkpoint_must_be_written(bench: Bench, background: str) -> None:
    failed = saves(bench, f'async_save = {background}\non_failure = "continue"', begin=7, fails=True)
    assert set(failed.codes) == {ExitCode.ENVIRONMENT}
    assert json.loads((bench.folder / "runs/run/status.json").read_text())["state"] == "failed"
    assert steps(bench, "aside") == [2, 4, 6]


@each_strategy
def test_a_full_checkpoint_holds_the_model_for_other_tools_and_resumes_like_any(bench: Bench, strategy: str) -> None:
    full = '[checkpoint]\nlayout = "full"\nevery = "100st"\n'
    bench("run", strategy, length="8st", more=full)
    model = load_file(bench.newest("run") / "model.safetensors")
    torch.testing.assert_close(model, weights_in(bench.newest("run")), rtol=0, atol=0)
    bench("run", strategy, length="10st", more=full, nproc=1)
    assert Reader(bench.newest("run")).facts.step == 10


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
def test_a_run_whose_folder_is_removed_fails_and_says_so(bench: Bench, when: str, said: str) -> None:
    """Also when nothing is left to do. What is wrong with status.json must not hide why the run failed."""
    (bench.folder / "gone.py").write_text(GONE)
    bench.recipe = bench.recipe.replace('every = "1st"', 'every = "100st"')
    more = f'[checkpoint]\nevery = "100st"\n[callbacks.gone]\nuse = "./gone.py:Gone"\nwhen = "{when}"'
    failed = bench("run", length="8st", more=more, nproc=1, fails=True)
    assert failed.codes == [ExitCode.ENVIRONMENT]
    assert said in failed.stderr
    assert "warning: while the run was ending: runs/run/logs cannot be written" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert failed.stdout == ""


def test_rows_that_somebody_removes_during_training_are_written_again(bench: Bench) -> None:
    (bench.folder / "gone.py").write_text(GONE)
    more = '[callbacks.gone]\nuse = "./gone.py:Gone"\nwhen = "step"\nwhat = "runs/run/metrics.jsonl"'
    said = bench("run", length="8st", more=more, nproc=1)
    assert "runs/run/metrics.jsonl was removed or replaced during training" in said.stderr
    bench("plain", length="8st", nproc=1)
    assert bench.column("run") == bench.column("plain")


def test_checkpoints_that_somebody_removes_during_training_are_missed(bench: Bench) -> None:
    (bench.folder / "gone.py").write_text(GONE)
    more = '[callbacks.gone]\nuse = "./gone.py:Gone"\nwhen = "step"\nwhat = "runs/run/checkpoints"'
    said = bench("run", length="8st", more=f'[checkpoint]\nevery = "2st"\nasync_save = false\n{more}', nproc=1)
    assert said.stderr.count("warning: runs/run/checkpoints is not there: it is made again") == 1
    assert steps(bench) == [8]
    bench("plain", length="8st", nproc=1)
    assert "made again" not in bench("plain", length="9st", nproc=1).stderr


def test_a_metric_that_is_to_decide_what_is_best_and_does_not_exist_is_named(bench: Bench) -> None:
    keep = '[checkpoint]\nkeep = { best = 1, monitor = "eval/acuracy", mode = "max" }'
    refused = bench("run", length="8st", more=keep, fails=True)
    assert set(refused.codes) == {ExitCode.USAGE}
    assert refused.stderr.count("no evaluation reports eval/acuracy") == 1
    assert not (bench.folder / "runs").exists()
