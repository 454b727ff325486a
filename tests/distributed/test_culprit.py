"""Failure reports: the surviving ranks report which rank failed first, and how, in status.json, console and logs."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks

from ddpforge.errors import ExitCode

RECIPE = """
recipe = 2
name = "run"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "100st", global_batch = 12, collective_timeout = "10m" }
[callbacks.fault]
use = "./faults.py:Fault"
"""
WAITS_LITTLE = "--set=train.collective_timeout=3s"  # for faults that are detected only at the timeout
FAULTS = '''
"""Faults of one rank at step 3."""

import os
import signal
import threading
import time
from ddpforge.errors import SetupError
from ddpforge.interfaces import Callback


def looks_up(key):
    return {}[key]


class Fault(Callback):
    def __init__(self, kind: str, rank: int = 1, waits: str = "") -> None:
        self.kind, self.rank, self.waits = kind, rank, waits

    def on_start(self, run):
        self.here = run.world.global_ranks.rank == self.rank

    def on_step(self, info):
        if info.step != 3:
            return
        if not self.here and self.waits:
            os.read(os.pipe()[0], 1)  # as in a kernel: Python runs no signal handler here
        if self.here:
            getattr(self, self.kind)()

    def raises(self):
        looks_up("absent")

    def refuses(self):
        raise SetupError("the disk of this rank is gone")

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def stopped(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def hangs(self):
        time.sleep(1000)

    def cannot_write(self):
        from ddpforge import disk

        real = disk.write

        def write(file, data):
            if "checkpoint" in threading.current_thread().name:
                time.sleep(1000)
            real(file, data)

        disk.write = write

    def aborts(self):
        os.abort()

    def full(self):
        from ddpforge.guard import memory_check

        def plan(recipe, ranks, budget):
            told = recipe.parent / "logs/failure-rank-1.json"
            (recipe.parent / "told").write_text(str(told.exists()))
            return {"peak": 10**12, "remedies": []}

        memory_check._planned = plan
        raise MemoryError
'''

Faulty = Callable[..., tuple[Ranks, dict[str, Any]]]


@pytest.fixture
def faulty(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Faulty:
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "faults.py").write_text(FAULTS)

    def run(kind: str, *more: str, rank: int = 1, nproc: int = 2) -> tuple[Ranks, dict[str, Any]]:
        sets = (f"--set=callbacks.fault.kind={kind}", f"--set=callbacks.fault.rank={rank}")
        ended = ddpforge("run", "run.toml", *sets, *more, nproc=nproc, fails=True)
        return ended, json.loads((tmp_path / "runs/run/status.json").read_text())

    return run


def test_first_failed_rank_prints_its_traceback_and_the_others_refer_to_it(tmp_path: Path, faulty: Faulty) -> None:
    ended, status = faulty("raises")
    assert ended.codes == [1, 1]
    assert (status["state"], status["exit_code"], status["error"]) == ("failed", 1, "rank 1: KeyError: 'absent'")
    assert "[rank 1] Traceback" in ended.stderr
    assert "error: rank 1 failed first: KeyError: 'absent'" in ended.stderr
    assert "see runs/run/logs/rank-1.log" in ended.stderr
    assert ended.stderr.count("Traceback") == 1
    assert "gloo" not in ended.stderr

    log = (tmp_path / "runs/run/logs/rank-1.log").read_text()
    assert "Traceback" in log
    assert "return {}[key]" in log
    assert "gloo" in (tmp_path / "runs/run/logs/rank-0.log").read_text()


def test_all_ranks_exit_with_the_code_of_the_first_failed_rank(faulty: Faulty) -> None:
    ended, status = faulty("refuses")
    assert ended.codes == [ExitCode.ENVIRONMENT] * 2
    assert status["exit_code"] == ExitCode.ENVIRONMENT
    assert status["error"] == "rank 1: SetupError: the disk of this rank is gone"
    assert "[rank 1] error: the disk of this rank is gone" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_out_of_memory_is_reported_to_other_ranks_before_the_memory_plan(tmp_path: Path, faulty: Faulty) -> None:
    ended, status = faulty("full", "--set=track.memory_check=on")
    assert ended.codes == [1, 1]
    assert (tmp_path / "runs/run/told").read_text() == "True"
    assert "by the plan a step needs 1.0 TB" in status["error"]
    assert "by the plan a step needs 1.0 TB" in ended.stderr
    failure = json.loads((tmp_path / "runs/run/failure.json").read_text())
    assert (failure["rank"], failure["told_by"]) == (1, "rank")
    assert "by the plan" in failure["error"]


DIED = r"was killed by signal \d+ \(SIG\w+\)|ended without a report: killed, or crashed"


@pytest.mark.parametrize(
    ("kind", "rank", "nproc", "said"),
    [
        ("killed", 1, 2, DIED),
        ("killed", 0, 2, DIED),
        ("aborts", 1, 3, DIED),
        pytest.param("stopped", 1, 2, "was frozen, as by SIGSTOP", marks=pytest.mark.full),
        pytest.param(
            "hangs", 1, 2, "made no progress in callbacks of step 3 for . s at .*faults.py", marks=pytest.mark.slow
        ),
    ],
)
def test_rank_that_cannot_report_is_named_by_the_others(
    tmp_path: Path, faulty: Faulty, kind: str, rank: int, nproc: int, said: str
) -> None:
    """Names a dead rank at once, and a silent one after `train.collective_timeout`."""
    more = [WAITS_LITTLE] if kind in ("stopped", "hangs") else []
    ended, status = faulty(kind, *more, rank=rank, nproc=nproc)
    assert all(ended.codes)
    assert status["state"] == "failed"
    assert re.match(f"rank {rank} ({said})", status["error"]), status["error"]
    assert ended.stderr.count(f"error: {status['error']}") == 1, ended.stderr
    assert "Traceback" not in ended.stderr
    assert "gloo" not in ended.stderr
    if kind == "aborts":
        assert re.search(r"in callbacks of step 3 at .*faults.py:\d+ in aborts", status["error"]), status["error"]
        assert "Fatal Python error: Aborted" in (tmp_path / f"runs/run/logs/stacks-rank-{rank}.txt").read_text()
    if kind == "stopped":
        assert ended.codes[rank] == -signal.SIGKILL


NO_DATA = """
import os
import signal
import time
from ddpforge.builtin.datasets.digits import Digits

HERE = int(os.environ["RANK"]) + 1 == int(os.environ["WORLD_SIZE"])


def fail(how):
    if how == "raises":
        open("not-on-this-machine")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "asked":
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(1000)


if HERE and os.environ.get("IMPORT"):
    fail(os.environ["IMPORT"])


class Missing(Digits):
    def __init__(self, how: str, split: str = "test") -> None:
        super().__init__(split=split)
        if HERE:
            fail(how)
"""


@pytest.fixture
def starting(tmp_path: Path) -> Path:
    """Returns the folder of a recipe whose last rank fails at its data or, if IMPORT is set, at the import."""
    data = 'data.train = { use = "./nodata.py:Missing", how = "hangs" }'
    text = RECIPE.partition("[callbacks.fault]")[0].replace('data.train = { use = "digits", split = "test" }', data)
    (tmp_path / "run.toml").write_text(text)
    (tmp_path / "nodata.py").write_text(NO_DATA)
    return tmp_path


def test_rank_that_fails_to_start_reports_its_error(starting: Path, ddpforge: Callable[..., Ranks]) -> None:
    ended = ddpforge("run", "run.toml", "--set=data.train.how=raises", nproc=2, fails=True)
    assert ended.codes[0] == ended.codes[1] > 0
    assert "not-on-this-machine" in ended.stderr
    assert "error: rank 1 failed first: " in ended.stderr
    assert "gloo" not in ended.stderr
    assert not (starting / "runs").exists()


@pytest.mark.parametrize("imports", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rank_killed_during_start_is_named(starting: Path, ddpforge: Callable[..., Ranks], imports: bool) -> None:
    """Covers ranks that wait in C++ for rank 1, or in a collective: they end before `train.collective_timeout`."""
    env = {"IMPORT": "killed"} if imports else {}
    ended = ddpforge("run", "run.toml", "--set=data.train.how=killed", env=env, nproc=2, fails=True)
    assert ended.codes == [1, -signal.SIGKILL]
    assert re.search(f"^error: rank 1 ({DIED}).* in start", ended.stderr, re.M), ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (starting / "runs").exists()


@pytest.mark.parametrize("imports", [True, pytest.param(False, marks=pytest.mark.full)])
def test_rank_that_hangs_during_start_is_named_with_its_line(
    starting: Path, ddpforge: Callable[..., Ranks], imports: bool
) -> None:
    env = {"IMPORT": "hangs"} if imports else {}
    ended = ddpforge("run", "run.toml", WAITS_LITTLE, env=env, nproc=2, fails=True)
    assert ended.codes == [1, -signal.SIGKILL]
    assert re.search(
        r"^error: rank 1 made no progress in start for \d+ s at .*nodata.py:\d+ in fail", ended.stderr, re.M
    )
    assert ended.stderr.count("error: ") == 1
    assert "Traceback" not in ended.stderr


def test_stop_request_during_start_ends_all_ranks(starting: Path, ddpforge: Callable[..., Ranks]) -> None:
    ended = ddpforge("run", "run.toml", env={"IMPORT": "asked"}, nproc=2, fails=True)
    assert ended.codes == [ExitCode.PREEMPTED] * 2
    assert "error: stopped before training began" in ended.stderr
    assert "Traceback" not in ended.stderr
    alone = ddpforge("run", "run.toml", "--set=data.train.how=asked", nproc=1, fails=True)
    assert alone.codes == [ExitCode.PREEMPTED]
    assert "error: stopped before training began" in alone.stderr


def test_recipe_error_of_one_rank_is_printed_once(starting: Path, ddpforge: Callable[..., Ranks]) -> None:
    ended = ddpforge("run", "run.toml", env={"IMPORT": "raises"}, nproc=2, fails=True)
    assert ended.codes == [ExitCode.USAGE] * 2
    assert ended.stderr.count("not-on-this-machine") == 1


JOINS_LATE = """
import os
import time

import torch.distributed.distributed_c10d as c10d
from ddpforge.interfaces import Callback

if os.environ["RANK"] == "1":
    real = c10d._new_process_group_helper

    def late(size, rank, ranks, backend, store, *arguments, **options):
        made = real(size, rank, ranks, backend, store, *arguments, **options)
        time.sleep(2)
        store.add("here", 1)  # rank 0 has the store
        return made

    c10d._new_process_group_helper = late


class JoinsLate(Callback):
    pass
"""


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("deepspeed", marks=pytest.mark.full)])
def test_refusal_reaches_ranks_that_join_late(tmp_path: Path, ddpforge: Callable[..., Ranks], strategy: str) -> None:
    """Checks that no rank leaves before all have joined: the others would end with code 1 and an error of gloo."""
    (tmp_path / "run.toml").write_text(RECIPE.replace("./faults.py:Fault", "./late.py:JoinsLate"))
    (tmp_path / "late.py").write_text(JOINS_LATE)
    sets = (f"--set=strategy.use={strategy}", '--set=train.blocks=["Nope"]', "--set=train.collective_timeout=1m")
    refused = ddpforge("run", "run.toml", *sets, nproc=2, fails=True)
    assert refused.codes == [ExitCode.USAGE] * 2, refused.stderr
    assert "train.blocks: the model has no Nope" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.full)])
def test_rank_that_hangs_in_a_save_ends_the_run_at_the_timeout(faulty: Faulty, background: str) -> None:
    sets = (WAITS_LITTLE, "--set=checkpoint.every=4st", f"--set=checkpoint.async_save={background}")
    ended, status = faulty("cannot_write", *sets)
    assert ended.codes == [ExitCode.ENVIRONMENT] * 2
    assert "CheckpointError: rank 1: nothing could be written for 3 s" in status["error"]
    assert "error: rank 1: nothing could be written for 3 s" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.full
@pytest.mark.parametrize("kind", ["killed", "raises"])
def test_rank_that_waits_uninterruptibly_ends_soon(tmp_path: Path, kind: str) -> None:
    """Uses the real launcher, whose SIGTERM such a rank does not handle, and a time limit of ten minutes."""
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "faults.py").write_text(FAULTS)
    sets = [
        f"--set=callbacks.fault.kind={kind}",
        "--set=callbacks.fault.waits=yes",
        "--set=train.collective_timeout=10m",
    ]
    command = [sys.executable, "-m", "ddpforge", "launch", "run.toml", "--nproc", "2", *sets, "--json"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    status = json.loads((tmp_path / "runs/run/status.json").read_text())
    assert status["state"] == "failed"
    if kind == "raises":
        assert status["error"] == "rank 1: KeyError: 'absent'"
    else:
        assert re.match(r"rank 1 was (killed|ended) by signal 9 \(SIGKILL\)", status["error"])
        assert f"error: {status['error']}" in ended.stderr.splitlines()[-2:]  # and a hint
        assert json.loads(ended.stdout) == status
    assert "in on_step" in (tmp_path / "runs/run/logs/stacks-rank-0.txt").read_text()  # the line at which it waited
    assert "ended because a rank has failed: rank 0 on " in (tmp_path / "runs/run/logs/rank-0.log").read_text()
