"""A save by two ranks that is interrupted at any operation leaves the complete old state or the complete new one.

Either both ranks die at once, as when a machine fails, or one rank dies and the other receives an error. Ranks run one
at a time (see `worlds`); tests use both orders.
"""

import itertools
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from checkpoint.doubles import FAILURES, Disk, Killed, checkpoint_of, read, state_of, steps_in
from checkpoint.worlds import World, checkpoints, share_of

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.retention import clean, newest
from ddpforge.errors import CheckpointError
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.schema import CheckpointSection

ORDERS = [(0, 1), (1, 0)]
SHARDED: dict[str, Any] = {"async_save": False}
SETTINGS = {"sharded": SHARDED, "full": {"async_save": False, "layout": "full"}, "background": {"async_save": True}}


def save(folder: Path, step: int, order: tuple[int, ...] = (0, 1), settings: dict[str, Any] = SHARDED) -> list[Any]:
    """Saves and prunes on two ranks; returns the path or the error of each."""
    checkpoint = checkpoint_of(step)

    def act(peers: WriterGroup) -> Path:
        saving = checkpoints(folder, peers, keep={"last": 1}, **settings)
        saving.save(checkpoint, share_of(checkpoint, peers.rank, 2))
        path = saving.wait()
        saving.finish()
        return path

    return World(2, order).run(act)


def crashes(
    tmp_path: Path,
    order: tuple[int, ...],
    disk: Callable[[int], Disk],
    *,
    before: int,
    settings: dict[str, Any] = SHARDED,
) -> Iterator[tuple[Path, list[Any]]]:
    """Yields, for each operation, a folder where a save died after `before` saved steps, and each rank's result."""
    base = tmp_path / "base"
    base.mkdir()
    for step in range(1, before + 1):
        assert all(isinstance(result, Path) for result in save(base, step, settings=settings))

    for at in itertools.count(1):
        folder = tmp_path / str(at)
        copytree(base, folder)
        failing = disk(at)
        with pytest.MonkeyPatch.context() as patch:
            failing.install(patch)
            results = save(folder, before + 1, order, settings)
        if not failing.failed:
            assert all(isinstance(result, Path) for result in results), results
            assert at > 10, "the disk double no longer sees the operations of a save"
            return
        yield folder, results


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize(("settings", "before"), [("sharded", 0), ("sharded", 2), ("full", 2), ("background", 2)])
def test_resume_finds_the_old_or_the_new_state_after_a_crash_of_the_machine_at_any_operation(
    tmp_path: Path, order: tuple[int, ...], failure: str, settings: str, before: int
) -> None:
    found = set()
    dying = crashes(tmp_path, order, lambda at: Disk(at, failure), before=before, settings=SETTINGS[settings])
    for folder, results in dying:
        assert any(isinstance(result, Killed) for result in results)
        found.add(state_of(folder))

    assert found == {before or None, before + 1}


@pytest.mark.parametrize("order", [ORDERS[0], pytest.param(ORDERS[1], marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("rank", [0, 1])
def test_the_death_of_one_rank_at_any_operation_is_an_error_on_the_other_and_the_run_can_resume(
    tmp_path: Path, order: tuple[int, ...], rank: int, settings: str
) -> None:
    found = set()
    dying = crashes(tmp_path, order, lambda at: Disk(at, "kill", rank=rank), before=2, settings=SETTINGS[settings])
    for folder, results in dying:
        assert isinstance(results[rank], Killed)
        pruning = rank == 0 and state_of(folder) == 3  # after rank 0 has sent the result
        assert isinstance(results[1 - rank], (CheckpointError, Path) if pruning else CheckpointError), results
        found.add(state_of(folder))
        if rank == 1:
            assert re.search(r"was not saved: no connection to (rank 1|a rank)", str(results[0]))
            assert not list(folder.glob(".step-*")), "rank 0 survives and cleans up"

        clean(folder)
        (path, _) = save(folder, 4)
        assert state_of(folder) == 4
        assert {each.name for each in folder.iterdir()} == {path.name, "latest.json"}
    assert found == ({2, 3} if rank == 0 else {2})


@pytest.mark.parametrize(
    ("forgotten", "survivor"), [((), 1), (("sync",), None), (("sync_folder",), None)], ids=["real", "files", "folders"]
)
def test_fsync_protects_a_completed_save_from_a_power_cut(
    folder: Path, forgotten: tuple[str, ...], survivor: float | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        double = Disk(0, "power, names lost", ignores=forgotten)
        double.install(patch)
        save(folder, 1)
        double.lose_power()

    assert state_of(folder) == survivor


def test_each_rank_syncs_its_files_before_the_commit(folder: Path) -> None:
    """Also the folder entries: an fsync of the folder by rank 0 has no effect on the disk of rank 1."""
    double, checkpoint = Disk(0, "power, names lost", rank=1), checkpoint_of(1)

    def act(peers: WriterGroup) -> Path:
        section = CheckpointSection.model_validate(SHARDED)
        saving = Checkpoints(folder, section, peers=peers, ranks=peers.ranks, before_commit=double.lose_power)
        saving.save(checkpoint, share_of(checkpoint, peers.rank, 2))
        return saving.wait()

    with pytest.MonkeyPatch.context() as patch:
        double.install(patch)
        World(2).run(act)
    assert double.count > 3
    assert state_of(folder) == 1


RANK = """
import os, signal, sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from checkpoint.doubles import checkpoint_of
from checkpoint.worlds import checkpoints, share_of
from ddpforge.ranks.writers import WriterGroup
from ddpforge import disk
from ddpforge.errors import CheckpointError
from ddpforge.ranks.collectives import ProcessGroup

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2,
                        timeout=timedelta(seconds=60))
saving = checkpoints(folder / "checkpoints", WriterGroup.of(ProcessGroup(dist.group.WORLD), timedelta(seconds=60)))

def save(step):
    checkpoint = checkpoint_of(step)
    saving.save(checkpoint, share_of(checkpoint, rank, 2))
    if step == 1:
        for _ in range(300):  # training continues in the default group
            dist.all_reduce(torch.ones(1))
    return saving.wait()

print(save(1).name, flush=True)
if rank == 1:
    disk.sync = lambda file: os.kill(os.getpid(), signal.SIGKILL)  # in the middle of its shard
try:
    save(2)
except CheckpointError as error:
    print(error.message, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_killed_process_is_an_error_in_the_other_and_keeps_the_earlier_checkpoint(tmp_path: Path) -> None:
    """Runs two processes over gloo; kills the second while it writes its shard."""
    here = Path(__file__).parents[1]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    (said, _), (said_by_killed, _) = (process.communicate(timeout=300) for process in processes)

    assert [process.returncode for process in processes] == [0, -signal.SIGKILL]
    name, message = said.splitlines()
    assert said_by_killed.splitlines() == [name]
    assert message.startswith("the checkpoint of step 2 was not saved: no connection to rank 1 (")
    path, skipped = newest(tmp_path / "checkpoints")
    assert path is not None
    assert (path.name, skipped, steps_in(read(path))) == (name, [], {1})
    assert {each.name for each in (tmp_path / "checkpoints").iterdir()} == {name, "latest.json"}
