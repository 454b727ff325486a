"""A save that is interrupted at any operation leaves all of the old state or all of the new one."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from checkpoint.doubles import FAILURES, Disk, Killed, checkpoint_of, state_of

from ddpforge.checkpoint import Checkpoints
from ddpforge.checkpoint.format import write
from ddpforge.checkpoint.retention import clean
from ddpforge.errors import CheckpointError
from ddpforge.recipe.schema import KeepSection

Save = Callable[[Path, int], object]


def prune_too(folder: Path, step: int) -> Path:
    checkpoints = Checkpoints(folder, keep=KeepSection(last=1), is_main=True, broadcast=lambda value: value)
    return checkpoints.save(checkpoint_of(step))


def write_only(folder: Path, step: int) -> Path:
    return write(folder, checkpoint_of(step))


def crashes(tmp_path: Path, failure: str, save: Save, *, before: int) -> Iterator[Path]:
    """A folder with checkpoints of the steps 1 to `before` in which saving the next died, for every operation."""
    for at in itertools.count(1):
        folder = tmp_path / str(at)
        folder.mkdir()
        for step in range(1, before + 1):
            save(folder, step)

        disk = Disk(at, failure)
        with pytest.MonkeyPatch.context() as patch:
            disk.install(patch)
            try:
                save(folder, before + 1)
            except Killed:
                pass
            else:
                assert at > 20, "the disk double no longer sees the operations of a save"
                return
        yield folder


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("save", "before"), [(write_only, 0), (write_only, 2), (prune_too, 2)])
def test_resume_finds_the_old_or_the_new_state_after_a_crash_at_any_operation(
    tmp_path: Path, failure: str, save: Save, before: int
) -> None:
    found = {state_of(folder) for folder in crashes(tmp_path, failure, save, before=before)}

    assert found == {before or None, before + 1}


@pytest.mark.parametrize("failure", FAILURES)
def test_after_any_crash_the_next_start_cleans_up_and_saves_again(tmp_path: Path, failure: str) -> None:
    for folder in crashes(tmp_path, failure, prune_too, before=2):
        clean(folder)
        saved = prune_too(folder, 4)

        assert state_of(folder) == 4
        assert {path.name for path in folder.iterdir()} == {saved.name, "latest.json"}


@pytest.mark.parametrize(
    ("forgotten", "survivor"), [((), 1), (("sync",), None), (("sync_folder",), None)], ids=["real", "files", "folders"]
)
def test_a_save_that_has_returned_survives_a_power_cut_thanks_to_its_fsyncs(
    folder: Path, forgotten: tuple[str, ...], survivor: float | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(0, "power, names lost", ignores=forgotten)
        disk.install(patch)
        write(folder, checkpoint_of(1))
        disk.lose_power()

    assert state_of(folder) == survivor


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path: Path) -> None:
    whole = Disk(0, "full")
    with pytest.MonkeyPatch.context() as patch:
        whole.install(patch)
        write(tmp_path, checkpoint_of(2))

    for at in range(1, whole.count + 1):
        folder = tmp_path / str(at)
        folder.mkdir()
        write(folder, checkpoint_of(1))

        with pytest.MonkeyPatch.context() as patch:
            Disk(at, "full").install(patch)
            with pytest.raises(CheckpointError) as caught:
                write(folder, checkpoint_of(2))
        assert f"could not be written to {folder}: No space left on device" in caught.value.message
        assert "it takes 206 bytes and" in caught.value.message
        assert state_of(folder) in (1, 2)
        assert not list(folder.glob(".step-*"))


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"could not be written to .*/file/checkpoints"):
        write(tmp_path / "file" / "checkpoints", checkpoint_of(1))
