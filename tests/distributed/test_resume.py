"""An interrupted run resumes with the results of an uninterrupted run."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from shutil import copy, copytree

import pytest
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, FSDP, ZERO, Bench

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.errors import ExitCode
from ddpforge.runs.folder import RunFolder

RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 4
hidden = [16, 16]
outputs = 1
dropout = {dropout}
[data.train]
use = "./parts.py:Points"
noisy = true
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
[optimizer]
use = "adamw"
lr = 1e-2
[schedule]
use = "cosine"
[train]
length = "30st"
global_batch = 8
micro_batch = 2
eval_every = "10st"
clip_norm = 0.5
[checkpoint]
every = "7st"
[track]
every = "1st"
[callbacks.ema]
decay = 0.9
{callbacks}
"""
INTERRUPTED = """
[callbacks.stop]
use = "./parts.py:StopAt"
step = 13
rank = {rank}
signal = "{signal}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy(SUPPORT / "parts.py", tmp_path)
    return tmp_path


def write(folder: Path, *, dropout: float = 0.3, callbacks: str = "") -> None:
    (folder / "run.toml").write_text(RECIPE.format(dropout=dropout, callbacks=callbacks))


def rows(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "runs/run/metrics.jsonl").read_text().splitlines())
    return [(line["step"], value) for line in lines for key, value in line.items() if key.endswith("/loss")]


def status(folder: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((folder / "runs/run/status.json").read_text())
    return found


@pytest.fixture
def undisturbed(ddpforge: Callable[..., Ranks], folder: Path) -> Callable[..., list[tuple[int, float]]]:
    """Returns a function that returns the losses of an uninterrupted run and moves its folder away."""

    def run(**options: float) -> list[tuple[int, float]]:
        write(folder, **options)
        ddpforge("run", "run.toml", nproc=2)
        found = rows(folder)
        (folder / "runs").rename(folder / "undisturbed")
        return found

    return run


def test_resume_after_a_stop_request_to_one_rank_is_bitwise(
    ddpforge: Callable[..., Ranks], folder: Path, undisturbed: Callable[..., list[tuple[int, float]]]
) -> None:
    """Covers traps 08, 09, 36: SIGTERM on rank 1 in mid-epoch stops both ranks with a checkpoint of the same step.

    After the resume, with dropout and augmentation, the losses are bitwise those of the undisturbed run.
    """
    expected = undisturbed()
    write(folder, callbacks=INTERRUPTED.format(rank=1, signal="SIGTERM"))
    stopped = ddpforge("run", "run.toml", nproc=2, fails=True)
    assert stopped.codes == [75, 75]
    assert (status(folder)["state"], status(folder)["exit_code"]) == ("preempted", 75)
    step = status(folder)["step"]
    assert isinstance(step, int)
    assert 13 <= step < 30

    ddpforge("run", "run.toml", nproc=2)
    assert rows(folder) == expected
    assert status(folder)["state"] == "done"


def test_resume_after_a_crash_replaces_later_rows(
    ddpforge: Callable[..., Ranks], folder: Path, undisturbed: Callable[..., list[tuple[int, float]]]
) -> None:
    """Kills the run at step 13: it resumes from the checkpoint of step 7, and rows 8 to 13 exist once."""
    expected = undisturbed()
    write(folder, callbacks=INTERRUPTED.format(rank=0, signal="SIGKILL"))
    at_once = ("--set", "checkpoint.async_save=false")  # step 7 is saved before step 8 begins
    killed = ddpforge("run", "run.toml", *at_once, nproc=2, fails=True)
    assert killed.codes[0] == -9
    assert max(step for step, _ in rows(folder)) in (12, 13)

    write(folder)
    ddpforge("run", "run.toml", nproc=2)
    assert rows(folder) == expected
    superseded = (folder / "runs/run/metrics.superseded.jsonl").read_text().splitlines()
    assert {json.loads(line)["step"] for line in superseded} <= set(range(8, 14))


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=pytest.mark.full), 4])  # test_anywhere.py resumes on one
def test_resume_on_another_number_of_ranks(
    ddpforge: Callable[..., Ranks],
    folder: Path,
    undisturbed: Callable[..., list[tuple[int, float]]],
    nproc: int,
) -> None:
    """Covers trap 19: without dropout the losses are equal up to rounding."""
    expected = undisturbed(dropout=0.0)
    write(folder, dropout=0.0, callbacks=INTERRUPTED.format(rank=0, signal="SIGUSR1"))
    assert ddpforge("run", "run.toml", nproc=2, fails=True).codes == [75, 75]

    ddpforge("run", "run.toml", nproc=nproc)
    found = rows(folder)
    assert [step for step, _ in found] == [step for step, _ in expected]
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-6)


def test_damaged_newest_checkpoint_is_skipped(
    ddpforge: Callable[..., Ranks], folder: Path, undisturbed: Callable[..., list[tuple[int, float]]]
) -> None:
    """Covers traps 16, 22, 29."""
    expected = undisturbed()
    copytree(folder / "undisturbed", folder / "runs")
    newest = max((folder / "runs/run/checkpoints").glob("step-*"))
    model = newest / "shard-00000-of-00002.safetensors"
    model.write_bytes(model.read_bytes()[:-1] + b"x")
    (folder / "runs/run/status.json").unlink()

    resumed = ddpforge("run", "run.toml", nproc=2)
    assert "step-000000030" in resumed.stderr
    assert model.name in resumed.stderr
    assert rows(folder) == expected


def test_resume_runs_an_evaluation_that_a_stop_skipped(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    """Stops in step 3, which takes effect at step 4, the end of an epoch."""
    bench = Bench(tmp_path, ddpforge)
    stop = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = 3\nrank = 0'
    bench("whole", length="8st")
    assert set(bench("parts", length="8st", more=stop, fails=True).codes) == {75}
    assert bench.column("parts", "eval/loss") == []
    bench("parts", length="8st", more=stop)
    assert bench.column("parts", "eval/loss") == bench.column("whole", "eval/loss")
    assert len(bench.column("whole", "eval/loss")) == 2


def test_other_callback_of_the_same_name_starts_from_scratch(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    bench = Bench(tmp_path, ddpforge)
    bench("run", length="6st", more='[callbacks.watch]\nuse = "ema"\ndecay = 0.5')
    stopping = '[callbacks.watch]\nuse = "early_stopping"\nmetric = "eval/loss"\npatience = 9'
    there = bench("run", length="8st", more=stopping)
    assert (
        there.stderr.count(
            "callbacks.watch `early_stopping` starts from scratch: the checkpoint has the state of `ema`"
        )
        == 1
    )
    assert len(bench.column("run", "train/loss")) == 8


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DDP, id="ddp", marks=pytest.mark.full),
        pytest.param(FSDP, id="fsdp", marks=pytest.mark.full),
        pytest.param(ZERO[1], id="zero1"),
    ],
)
def test_other_optimizer_starts_from_scratch(ddpforge: Callable[..., Ranks], tmp_path: Path, strategy: str) -> None:
    """Drops the state of the previous optimizer: SGD's momentum means nothing to AdamW."""
    bench = Bench(tmp_path, ddpforge)
    sets = ["--set=optimizer.use=sgd", "--set=optimizer.lr=0.01", "--set=optimizer.momentum=0.9"]
    bench("run", strategy, length="8st")
    keys = {key for entry in CheckpointReader(bench.newest("run")).state().optimizer.values() for key in entry}

    allowed = ["--allow-change=optimizer", "--set=train.length=10st"]
    there = ddpforge("run", "run.toml", *sets, *allowed, nproc=2)
    assert there.stderr.count("optimizer `sgd` starts from scratch: the checkpoint has the state of `adamw`") == 1
    kept = {key for entry in CheckpointReader(bench.newest("run")).state().optimizer.values() for key in entry}
    assert kept == {"momentum_buffer"}

    back = ddpforge("run", "run.toml", "--allow-change=optimizer", "--set=train.length=12st", nproc=2)
    assert "the state of `sgd`" in back.stderr
    assert {key for entry in CheckpointReader(bench.newest("run")).state().optimizer.values() for key in entry} == keys

    on = ddpforge("run", "run.toml", "--set=train.length=13st", nproc=2)
    assert "afresh" not in on.stderr


def test_length_may_be_cut_to_the_current_step_but_not_below(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    bench = Bench(tmp_path, ddpforge)
    stop = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = 6\nrank = 0'
    assert set(bench("run", length="30st", train='eval_every = "30st"', more=stop, fails=True).codes) == {75}
    assert bench.column("run", "eval/loss") == []
    reached = RunFolder(tmp_path / "runs/run").status()["step"]  # type: ignore[index]

    refused = bench("run", length=f"{reached - 1}st", train='eval_every = "30st"', more=stop, fails=True)
    assert set(refused.codes) == {ExitCode.USAGE}
    assert f"is at step {reached} already, but train.length ends at step {reached - 1}" in refused.stderr
    assert RunFolder(tmp_path / "runs/run").status()["state"] == "preempted"  # type: ignore[index]

    bench("run", length=f"{reached}st", train='eval_every = "30st"', more=stop)
    assert len(bench.column("run", "eval/loss")) == 1


def test_run_without_checkpoints_restarts_with_a_warning(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    bench = Bench(tmp_path, ddpforge)
    bench("run", length="8st", nproc=1)
    checkpoints = tmp_path / "runs/run/checkpoints"
    checkpoints.rename(tmp_path / "aside")
    said = bench("run", length="9st", nproc=1)
    assert (
        "runs/run has no checkpoints: training starts from scratch, although an earlier attempt reached step 8"
        in said.stderr
    )

    checkpoints.rename(tmp_path / "again")
    checkpoints.symlink_to("disk-that-is-not-mounted")
    refused = bench("run", length="10st", fails=True)
    assert refused.codes == [ExitCode.ENVIRONMENT] * 2
    assert "runs/run/checkpoints → disk-that-is-not-mounted: No such file or directory" in refused.stderr
    assert str(RunFolder(tmp_path / "runs/run").status()["error"]).startswith("rank 0: CheckpointError")  # type: ignore[index]


def test_only_one_process_trains_in_a_folder(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    """Protects the checkpoint that the first process is writing: a second process would delete it."""
    bench = Bench(tmp_path, ddpforge)
    bench("run", length="8st", nproc=1)
    folder = RunFolder(tmp_path / "runs/run")
    draft = folder.checkpoints / ".step-000000009-abcd.tmp"
    draft.mkdir()
    with folder.claim():
        for more in ([], ["--fresh"]):
            refused = ddpforge("run", "run.toml", "--set=train.length=10st", *more, nproc=2, fails=True)
            assert refused.codes == [ExitCode.ENVIRONMENT] * 2
            assert f"another training already uses runs/run: process {os.getpid()} on" in refused.stderr
            assert "Traceback" not in refused.stderr
        assert draft.is_dir()
    bench("run", length="10st")
    assert CheckpointReader(bench.newest("run")).metadata.step == 10
    assert not draft.exists()
