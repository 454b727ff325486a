"""Saves to a file system that is really full: a small tmpfs with every possible number of free pages."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.doubles import Checkpoint, checkpoint_of, state_of
from checkpoint.worlds import World, checkpoints, share_of

from ddpforge.errors import CheckpointError
from ddpforge.ranks.writers import Peers

TESTS = Path(__file__).parents[1]
MOUNTS = ["unshare", "--map-root-user", "--mount"]  # what is mounted inside is seen by nobody else, and goes by itself
PAGE = os.sysconf("SC_PAGE_SIZE")
PAGES = 128

cannot_mount = shutil.which("unshare") is None or subprocess.run([*MOUNTS, "true"], check=False).returncode != 0


def larger(step: int) -> Checkpoint:
    """Every number is `step`; some pages of weights, momentum and averages."""
    checkpoint = checkpoint_of(step)
    weight = torch.full((64, 128), float(step))
    model = {**checkpoint.state.model, "layer.weight": weight}
    optimizer = {**checkpoint.state.optimizer, "layer.weight": {"exp_avg": weight}}
    state = replace(checkpoint.state, model=model, optimizer=optimizer)
    return replace(checkpoint, state=state, callbacks={"ema": {"layer.weight": weight}})


def save(folder: Path, step: int, layout: str) -> list[Any]:
    """What saving and pruning returns or raises on each of two ranks."""

    def act(peers: Peers) -> Path:
        saving = checkpoints(folder, peers, layout=layout, async_save=False, keep={"last": 1})
        saving.save(larger(step), share_of(larger(step), peers.rank, 2))
        return saving.wait()

    return World(2).run(act)


def run_full(disk: Path, layout: str) -> None:
    """Leaves one page more free each time, until a save goes through."""
    folder, ballast = disk / "checkpoints", disk / "ballast"
    before = 1
    assert all(isinstance(result, Path) for result in save(folder, before, layout))
    for free in range(PAGES):
        with ballast.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - free * PAGE)
        results = save(folder, before + 1, layout)
        ballast.unlink()

        if not any(isinstance(result, CheckpointError) for result in results):
            assert all(isinstance(result, Path) for result in results), results
            assert state_of(folder) == before + 1
            print(free)
            return
        assert all(isinstance(result, CheckpointError) for result in results), results
        assert "No space left on device" in str(results[0]), results[0]
        assert state_of(folder) == before, "the old checkpoint is whole"
        assert not list(folder.glob(".*")), "nothing is left behind"
    raise AssertionError("no save went through")


@pytest.mark.skipif(cannot_mount, reason="unshare --mount is not allowed here")
@pytest.mark.parametrize("layout", [pytest.param("sharded", marks=pytest.mark.full), "full"])
def test_a_file_system_that_runs_full_at_any_page_of_a_save_costs_that_save_alone(tmp_path: Path, layout: str) -> None:
    """Where the model is written in one file, shards are written first: `make test-all` writes them alone."""
    mount = (
        f"mount -t tmpfs -o size={PAGES * PAGE} none {tmp_path} && exec {sys.executable} {__file__} {tmp_path} {layout}"
    )
    done = subprocess.run(
        [*MOUNTS, "sh", "-c", mount],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) > 30


if __name__ == "__main__":
    run_full(Path(sys.argv[1]), sys.argv[2])
