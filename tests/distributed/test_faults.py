"""A rank hangs, freezes or dies: the job ends soon and reports rank, phase and step."""

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from support.hosts import Command, Hosts
from support.launched import Ranks
from support.sharding import DDP, FSDP, ZERO

STALL = 3.0
RECIPE = """
recipe = 2
name = "run"
model = {{ use = "./faults.py:Net" }}
data.train = {{ use = "./faults.py:Points" }}
data.eval = {{ use = "digits", split = "test" }}
task = {{ use = "classification" }}
optimizer = {{ use = "sgd", lr = 0.1 }}
train = {{length = "100000st", global_batch = 12, hang_timeout = "{stall:g}s", eval_every="{every}", eval_batch=100}}
checkpoint = {{ every = "{every}" }}
track.every = "1000st"
strategy = {{ {strategy} }}
[callbacks.fault]
use = "./faults.py:Fault"
kind = "{kind}"
rank = {rank}
"""
FAULTS = '''
"""Strikes on one rank, in the step after the third, in the evaluation of the fifth, or in its checkpoint."""

import ctypes
import errno
import os
import signal
import threading
import time
from pathlib import Path

from ddpforge.builtin.datasets.digits import Digits
from ddpforge.builtin.models.mlp import MLP
from ddpforge.interfaces import Callback

armed = ""


def strike(*kinds):
    if armed not in kinds:
        return
    Path("struck").write_text(str(time.time()))
    if armed == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if armed == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if armed == "gil":
        ctypes.PyDLL(None).sleep(3600)
    threading.Event().wait()


class Points(Digits):
    def __init__(self) -> None:
        super().__init__(split="test")

    def __getitems__(self, ids):
        strike("data")
        return super().__getitems__(ids)


def in_forward(layer, inputs):
    strike("killed", "frozen", "gil") if layer.training else strike("eval")


class Net(MLP):
    def __init__(self) -> None:
        super().__init__(inputs=64, outputs=10, hidden=[8])
        for layer in self.layers:  # each rank of a pipeline has some of them
            layer.register_forward_pre_hook(in_forward)


class Fault(Callback):
    def __init__(self, kind: str, rank: int) -> None:
        self.kind, self.rank = kind, rank

    def on_start(self, run):
        self.here = run.world.global_ranks.rank == self.rank
        if self.kind == "full" and self.here:
            from ddpforge import disk

            def write(file, data):
                if "checkpoint" in threading.current_thread().name:
                    Path("struck").write_text(str(time.time()))
                    raise OSError(errno.ENOSPC, "No space left on device")
                real(file, data)

            real, disk.write = disk.write, write

    def on_step(self, info):
        global armed
        if self.here and info.step >= 3:
            armed = self.kind

    def state(self):
        strike("save")
        return {}

    def load_state(self, state):
        pass
'''


class Expected(NamedTuple):
    """Expected report of a fault."""

    said: str
    phase: str
    step: int
    limit: float = STALL


KINDS = {
    # Only the kernel knows the signal, until the parent process has waited for the rank.
    "killed": Expected(r"(was killed by signal 9 \(SIGKILL\)|ended without a report)", "forward", 4, 0.0),
    "frozen": Expected("was frozen, as by SIGSTOP, in forward of step 4", "forward", 4),
    "gil": Expected("made no progress in forward of step 4", "forward", 4),
    "data": Expected("made no progress in data of step 4", "data", 4),
    "eval": Expected("made no progress in eval of step 5", "eval", 5, 3 * STALL),
    "save": Expected("made no progress in save of step 5", "save", 5, 6 * STALL),
}
TENSOR = f'{FSDP}\ntensor = 2\nplan = {{ "layers.0" = "colwise", "layers.3" = "rowwise" }}'
STRATEGIES = {"ddp": DDP, "fsdp": FSDP, "tensor": TENSOR, "zero3": ZERO[3], "pipeline": 'use = "pipeline"'}
DEFAULT = [("data", "ddp", 1), ("frozen", "ddp", 0)]
CASES = [
    pytest.param(kind, name, rank, marks=() if (kind, name, rank) in DEFAULT else pytest.mark.full)
    for kind in KINDS
    for name in STRATEGIES
    for rank in (0, 1)
]


def prepare(folder: Path, kind: str, rank: int, strategy: str, every: str = "5st") -> None:
    table = strategy.replace("\n", ", ")
    text = RECIPE.format(kind=kind, rank=rank, strategy=table, stall=STALL, every=every)
    (folder / "run.toml").write_text(text)
    (folder / "faults.py").write_text(FAULTS)


def read_report(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"runs/run/{name}.json").read_text())
    return found


def remaining_processes(folder: Path) -> list[str]:
    """Returns the processes of a run in `folder` that still exist after a moment."""
    deadline = time.monotonic() + 5
    while (found := _processes(folder)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found


def _processes(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in " ".join(process.cmdline()) or process.cwd() == str(folder):
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:200]}")
        except psutil.Error:
            continue
    return found


@pytest.mark.parametrize(("kind", "strategy", "rank"), CASES)
def test_fault_of_one_rank_ends_the_job_and_is_reported(
    tmp_path: Path,
    ddpforge: Callable[..., Ranks],
    kind: str,
    strategy: str,
    rank: int,
) -> None:
    expected = KINDS[kind]
    prepare(tmp_path, kind, rank, STRATEGIES[strategy])
    ended = ddpforge("run", "run.toml", nproc=2, fails=True)
    seconds = time.time() - float((tmp_path / "struck").read_text())
    print(f"{kind} {strategy} {rank}: over after {seconds:.1f} s, limit {expected.limit:g} s")
    assert all(ended.codes)
    status, failure = read_report(tmp_path, "status"), read_report(tmp_path, "failure")
    assert status["state"] == "failed"
    assert re.match(f"rank {rank} {expected.said}", status["error"]), status["error"]
    assert (failure["error"], failure["told_by"]) == (status["error"], "watch")
    assert (failure["rank"], failure["phase"], failure["step"]) == (rank, expected.phase, expected.step)
    assert failure["waited_for"] == [rank]
    assert seconds < expected.limit + 10
    assert remaining_processes(tmp_path) == []
    assert ended.stderr.count(f"error: {status['error']}") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    if kind != "killed":
        assert failure["seconds"] >= expected.limit
        stood = (tmp_path / f"runs/run/logs/stacks-rank-{1 - rank}.txt").read_text()
        assert "_compute" in stood or "run_microbatches" in stood or "save" in stood or "evaluat" in stood


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_full_disk_of_one_rank_ends_the_job_and_is_reported(
    tmp_path: Path, ddpforge: Callable[..., Ranks], strategy: str, rank: int
) -> None:
    prepare(tmp_path, "full", rank, strategy)
    ended = ddpforge("run", "run.toml", nproc=2, fails=True)
    assert time.time() - float((tmp_path / "struck").read_text()) < 10
    assert ended.codes == [3, 3]
    assert f"rank {rank}: " in read_report(tmp_path, "status")["error"].partition("CheckpointError")[2]
    assert "No space left on device" in read_report(tmp_path, "failure")["error"]
    assert remaining_processes(tmp_path) == []


SERVES = """
from ddpforge.launchers.store import serving
import time
with serving("", 29800):
    time.sleep(600)
"""


def until_watched(folder: Path, commands: Sequence[Command]) -> None:
    """Waits until the watchdog files of both ranks show that training is beyond its first steps.

    In the first step each phase may take three times as long, and start-up six times.
    """

    def shown(rank: int) -> int:
        try:
            step: int = json.loads((folder / f"runs/run/logs/phase-rank-{rank}.json").read_text())["row"]["step"]
        except OSError:
            return 0
        return step

    while min(shown(0), shown(1)) < 3:
        assert all(command.poll() is None for command in commands), [command.ended() for command in commands]
        time.sleep(0.1)


@pytest.mark.full
@pytest.mark.parametrize("cut", ["a", "b"])
@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_network_failure_ends_the_ranks_on_both_hosts(tmp_path: Path, hosts: Hosts, strategy: str, cut: str) -> None:
    """Expects rank 1 to be reported: the first host has the store, so the other host lost the connection."""
    prepare(tmp_path, "none", 0, strategy, every="100000st")
    store = hosts["a"].start(sys.executable, "-c", SERVES, cwd=tmp_path)
    ranks = []
    for rank, letter in enumerate("ab"):
        world = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "OMP_NUM_THREADS": 1}
        places = {"MASTER_ADDR": "nodea", "MASTER_PORT": 29801, "DDPFORGE_STORE": "nodea:29800"}
        others = {"GLOO_SOCKET_IFNAME": "eth0", "DS_ACCELERATOR": "cpu"}
        env = {name: str(value) for name, value in {**world, **places, **others}.items()}
        command = (sys.executable, "-m", "ddpforge", "run", "run.toml")
        ranks.append(hosts[letter].start(*command, cwd=tmp_path, env=env))
    until_watched(tmp_path, ranks)
    hosts.cut(cut)
    began = time.time()
    codes = [rank.ended(60)[0] for rank in ranks]
    seconds = time.time() - began
    print(f"cut {cut}: over after {seconds:.1f} s")
    store.kill()
    assert all(codes)
    assert seconds < STALL + 10
    error = read_report(tmp_path, "status")["error"]
    assert re.match(
        r"rank 1 (on nodeb lost its connection to the first host|did not answer \(process \d+ on nodeb\))", error
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "rank", "said"),
    [
        ("cut a", 1, "on nodeb lost its connection to the first host"),
        ("cut b", 1, "on nodeb lost its connection to the first host"),
        ("killed", 1, KINDS["killed"].said),
        ("frozen", 0, KINDS["frozen"].said),
    ],
)
def test_launches_on_two_hosts_end_soon_with_the_error(
    tmp_path: Path, hosts: Hosts, fault: str, rank: int, said: str
) -> None:
    """Covers a cut, which the other host's launcher does not see: it would wait a minute for the first host's store."""
    kind, _, cut = fault.partition(" ")
    prepare(tmp_path, "none" if cut else kind, rank, DDP, every="100000st" if cut else "5st")
    command = (sys.executable, "-m", "ddpforge", "launch", "run.toml", "-n", "1", "--nnodes=2", "--rdzv-endpoint=nodea")
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
    launches = [hosts[letter].start(*command, cwd=tmp_path, env=env) for letter in "ab"]
    if cut:
        until_watched(tmp_path, launches)
        (tmp_path / "struck").write_text(str(time.time()))
        hosts.cut(cut)
    ended = [launch.ended() for launch in launches]
    seconds = time.time() - float((tmp_path / "struck").read_text())
    print(f"{fault}, by launch: over after {seconds:.1f} s")
    error = read_report(tmp_path, "status")["error"]
    assert re.match(f"rank {rank} {said}", error), error
    assert [code for code, _ in ended] == [1, 1]
    assert all(f"error: {error}" in text and "Traceback" not in text for _, text in ended), ended
    assert seconds < STALL + 10
    assert remaining_processes(tmp_path) == []
