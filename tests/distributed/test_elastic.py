"""Machines join and leave while a run trains; each host here has its own network. All launchers are real."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.hosts import Command, Hosts

from ddpforge.errors import ExitCode

pytestmark = pytest.mark.full

RECIPE = """
recipe = 2
name = "run"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.01 }
train = { length = "3000st", global_batch = 12 }
track.every = "10st"
checkpoint.every = "100st"
callbacks.slow = { use = "./slow.py:Slow", seconds = 0.0 }
"""
SLOW = """
import time
from ddpforge.interfaces import Callback


class Slow(Callback):
    def __init__(self, seconds: float):
        self.seconds = seconds

    def on_step(self, info):
        time.sleep(self.seconds)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "slow.py").write_text(SLOW)
    return tmp_path


def status(folder: Path, name: str = "run") -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / f"runs/{name}/status.json").read_text())
    except OSError:
        return {"step": 0, "world_size": 0}
    return found


def losses(folder: Path, name: str) -> dict[int, float]:
    rows = map(json.loads, (folder / f"runs/{name}/metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def until(what: Callable[[], bool], limit: float = 180) -> None:
    deadline = time.monotonic() + limit
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def trains(folder: Path, ranks: int, more: int = 30) -> None:
    """Waits until `ranks` ranks have trained `more` steps together."""
    until(lambda: status(folder)["world_size"] == ranks)
    rows = folder / "runs/run/metrics.jsonl"
    began = rows.stat().st_size
    until(lambda: rows.stat().st_size > began + 60 * more // 10)


def launched(hosts: Hosts, host: str, folder: Path, *more: str) -> Command:
    words = (sys.executable, "-m", "ddpforge", "launch", "run.toml", "-n", "1", *more)
    return hosts[host].start(*words, cwd=folder, env={"OMP_NUM_THREADS": "1"})


def test_curve_is_unchanged_when_machines_join_leave_and_die(hosts: Hosts, folder: Path) -> None:
    """Lets b join, leave on request, come back, and lose its power; a alone trains to the end."""
    ddpforge = (sys.executable, "-m", "ddpforge", "run", "run.toml", "--set=name=undisturbed")
    code, said = hosts["a"].start(*ddpforge, cwd=folder, env={"OMP_NUM_THREADS": "1"}).ended(timeout=300)
    assert code == 0, said

    elastic = ("--nnodes=1:2", "--rdzv-endpoint=nodea", "--max-restarts=3", "--set=callbacks.slow.seconds=0.03")
    first = launched(hosts, "a", folder, *elastic)
    trains(folder, 1)
    second = launched(hosts, "b", folder, *elastic)
    trains(folder, 2)
    second.signal(signal.SIGTERM)
    code, said = second.ended()
    assert code == ExitCode.PREEMPTED, said
    trains(folder, 1)
    launched(hosts, "b", folder, *elastic)
    trains(folder, 2)
    hosts["b"].end()
    code, said = first.ended(timeout=400)
    assert code == 0, said
    assert status(folder)["state"] == "done"
    assert losses(folder, "run") == pytest.approx(losses(folder, "undisturbed"), rel=1e-4)


def test_world_size_that_does_not_divide_the_batch_is_refused(hosts: Hosts, folder: Path) -> None:
    """Uses torchrun's own flags, with which the world size is unknown beforehand; a restart does not help."""
    flags = ("--nnodes=1:2", "--rdzv-backend=c10d", "--rdzv-endpoint=nodea:29500", "--max-restarts=3")
    given = ("--set=train.global_batch=11", "--set=callbacks.slow.seconds=0.03", "--", *flags)
    first = launched(hosts, "a", folder, *given)
    trains(folder, 1)
    second = launched(hosts, "b", folder, *given)
    for command in (first, second):
        code, said = command.ended()
        assert code == ExitCode.USAGE, said
        assert "cannot be divided evenly among 2 ranks" in said or command is second
    found = status(folder)
    assert (found["state"], found["exit_code"]) == ("failed", ExitCode.USAGE)
    assert "cannot be divided evenly among 2 ranks" in found["error"]
