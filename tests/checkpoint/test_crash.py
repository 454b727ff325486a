"""A save that is interrupted at any disk operation leaves either the complete old state or the complete new one."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from checkpoint.doubles import FAILURES, Disk, Killed, checkpoint_of, state_of, write
from checkpoint.worlds import checkpoints

from ddpforge import disk
from ddpforge.checkpoint.retention import clean
from ddpforge.errors import CheckpointError
from ddpforge.ranks.writers import WriterGroup

Save = Callable[[Path, int], object]


def save_and_prune(folder: Path, step: int, *, background: bool = False) -> Path:
    saving = checkpoints(folder, WriterGroup.alone(), async_save=background, keep={"last": 1})
    checkpoint = checkpoint_of(step)
    saving.save(checkpoint, checkpoint.share)
    path = saving.wait()
    saving.finish()
    return path


def write_only(folder: Path, step: int, *, full: bool = False) -> Path:
    return write(folder, checkpoint_of(step), full=full)


SAVES = [(write_only, 0), (write_only, 2), (partial(write_only, full=True), 2), (save_and_prune, 2)]
SAVES += [(partial(save_and_prune, background=True), 2)]


def crashes(tmp_path: Path, failure: str, save: Save, *, before: int) -> Iterator[Path]:
    """Yields, for each disk operation of a save, a folder with steps 1 to `before` where the next save died there."""
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        for step in range(1, before + 1):
            save(folder, step)

        double = Disk(at, failure)
        with pytest.MonkeyPatch.context() as patch:
            double.install(patch)
            try:
                save(folder, before + 1)
            except Killed:
                pass
            else:
                assert at > 12, "the disk double no longer sees the operations of a save"
                return
        yield folder


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("save", "before"), SAVES, ids=["first", "third", "full", "pruned", "background"])
def test_resume_finds_the_old_or_the_new_state_after_a_crash_at_any_operation(
    tmp_path: Path, failure: str, save: Save, before: int
) -> None:
    found = {state_of(folder) for folder in crashes(tmp_path, failure, save, before=before)}

    assert found == {before or None, before + 1}


@pytest.mark.parametrize("failure", FAILURES)
def test_after_a_crash_the_next_start_cleans_up_and_saves(tmp_path: Path, failure: str) -> None:
    for folder in crashes(tmp_path, failure, save_and_prune, before=2):
        clean(folder)
        saved = save_and_prune(folder, 4)

        assert state_of(folder) == 4
        assert {path.name for path in folder.iterdir()} == {saved.name, "latest.json"}


@pytest.mark.parametrize(
    ("forgotten", "survivor"), [((), 1), (("sync",), None), (("sync_folder",), None)], ids=["real", "files", "folders"]
)
def test_fsync_protects_a_completed_save_from_a_power_cut(
    folder: Path, forgotten: tuple[str, ...], survivor: float | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        double = Disk(0, "power, names lost", ignores=forgotten)
        double.install(patch)
        write(folder, checkpoint_of(1))
        double.lose_power()

    assert state_of(folder) == survivor


@pytest.mark.parametrize("full", [False, True], ids=["sharded", "full"])
def test_a_full_disk_fails_the_save_and_keeps_the_old_checkpoint(tmp_path: Path, full: bool) -> None:
    save = partial(write_only, full=full)
    whole = Disk(0, "full")
    with pytest.MonkeyPatch.context() as patch:
        whole.install(patch)
        save(tmp_path, 2)

    for at in range(1, whole.count + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        save(folder, 1)

        with pytest.MonkeyPatch.context() as patch:
            Disk(at, "full").install(patch)
            with pytest.raises(CheckpointError) as caught:
                save(folder, 2)
        assert f"could not be written to {folder}: No space left on device" in caught.value.message
        assert "it takes 206 bytes and" in caught.value.message
        assert state_of(folder) in (1, 2)
        assert not list(folder.glob(".*")), "no temporary folder or hint is left"


def test_save_replaces_the_temporary_hint_of_a_killed_attempt(folder: Path) -> None:
    (folder / ".latest.json.tmp").write_text('{"dir": "step-0000')
    path = write(folder, checkpoint_of(5))
    assert json.loads((folder / "latest.json").read_text()) == {"dir": path.name, "step": 5}
    assert {found.name for found in folder.iterdir()} == {path.name, "latest.json"}


def test_error_names_a_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"could not be written to .*/file/checkpoints"):
        write(tmp_path / "file" / "checkpoints", checkpoint_of(1))


FAILING = """
import sys, threading
from pathlib import Path
from checkpoint.doubles import checkpoint_of
from checkpoint.worlds import checkpoints
from ddpforge.ranks.writers import WriterGroup
from ddpforge import disk

folder, stuck = Path(sys.argv[1]), threading.Event()
saving = checkpoints(folder, WriterGroup.alone())
for step in (1, 2):
    saving.save(checkpoint_of(step), checkpoint_of(step).share)
    if step == 1:
        saving.wait()
        disk.sync = lambda file: (stuck.set(), threading.Event().wait())  # a disk that never responds
stuck.wait()
raise ZeroDivisionError("training failed")
"""


@pytest.mark.slow
def test_a_failing_process_does_not_wait_for_a_save_and_keeps_the_earlier_checkpoint(folder: Path) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-c", FAILING, str(folder)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    while "training failed" not in (line := process.stderr.readline()):
        assert line, "the process ended before it failed"
    process.communicate(timeout=300)  # the simulated disk never returns

    # 1; or -6, because the interpreter's shutdown sometimes aborts in a thread of torch. `ddpforge run` avoids this.
    assert process.returncode in (1, -signal.SIGABRT)
    assert state_of(folder) == 1
    assert len(list(folder.glob(".step-*.tmp"))) == 1
    clean(folder)
    assert {each.name.partition("-")[0] for each in folder.iterdir()} == {"step", "latest.json"}


def test_the_first_checkpoint_of_a_new_folder_survives_a_power_cut(tmp_path: Path) -> None:
    """Needs an fsync of the parent folder, which has the entry of the new one."""
    double = Disk(at=0, failure="power, names lost")
    with pytest.MonkeyPatch.context() as patch:
        double.install(patch)
        write_only(tmp_path / "checkpoints", 1)
        double.lose_power()
    assert state_of(tmp_path / "checkpoints") == 1


def test_a_replaced_file_holds_the_new_contents_after_a_power_cut(tmp_path: Path) -> None:
    (tmp_path / "status.json").write_bytes(b"old")
    double = Disk(at=0, failure="power, names lost")
    with pytest.MonkeyPatch.context() as patch:
        double.install(patch)
        disk.replace(tmp_path / "status.json", b"new")
        double.lose_power()
    assert (tmp_path / "status.json").read_bytes() == b"new"
