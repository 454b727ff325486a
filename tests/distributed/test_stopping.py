"""A stop request on one rank, or in the run's folder, stops all ranks at one step, with the same final result."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.forked import in_ranks
from support.launched import Ranks

import ddpforge as package
from ddpforge.errors import ExitCode, ForgeError
from ddpforge.ranks.signals import StopRequests

RECIPE = """
recipe = 2
name = "run"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
data.eval = { use = "./asking.py:Asking" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "6st", global_batch = 12, eval_every = "2st" }
track.every = "1st"
checkpoint.every = "9999ep"
callbacks.touches = { use = "./asking.py:Touches", at = 0 }
"""
ASKING = """
import os, signal
from pathlib import Path
from ddpforge.interfaces import Callback
from ddpforge.builtin.datasets.digits import Digits


class Asking(Digits):
    def __init__(self, rank: int = -1):
        super().__init__(split="test")
        self.rank = rank

    def __getitems__(self, ids):
        if str(self.rank) == os.environ.get("RANK") and "TRAINS" in os.environ:  # not in preflight
            self.rank = -1
            os.kill(os.getpid(), signal.SIGUSR1)
        return super().__getitems__(ids)


class Touches(Callback):
    def __init__(self, at: int):
        self.at = at

    def on_start(self, run):
        self.file = run.folder / "STOP"

    def on_step(self, info):
        os.environ["TRAINS"] = "yes"
        if info.step == self.at:
            self.file.touch()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)
    Path("asking.py").write_text(ASKING)
    return tmp_path


def status(name: str = "run") -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(f"runs/{name}/status.json").read_text())
    return found


def rows(name: str = "run") -> dict[str, list[tuple[int, float]]]:
    found = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return {key: [(row["step"], row[key]) for row in found if key in row] for key in ("train/loss", "eval/loss")}


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_stop_during_an_evaluation_keeps_the_curve(ddpforge: Callable[..., Ranks], strategy: str) -> None:
    """Sends the stop request to rank 1 only, when it fetches its first samples to evaluate."""
    given = ["run", "run.toml", f"--set=strategy.use={strategy}", "--allow-change=data.eval"]
    ddpforge(*given, "--set=name=undisturbed", nproc=2)

    stopped = ddpforge(*given, "--set=data.eval.rank=1", nproc=2, fails=True)
    assert stopped.codes == [ExitCode.PREEMPTED] * 2, stopped.stderr
    assert (status()["state"], status()["step"]) == ("preempted", 2)
    assert rows()["eval/loss"] == []

    ddpforge(*given, nproc=2)
    assert status()["state"] == "done"
    assert rows() == rows("undisturbed")


@pytest.mark.parametrize("asked", ["--max-time=1s", "--set=callbacks.touches.at=4"])
def test_max_time_or_a_stop_file_stops_a_run(ddpforge: Callable[..., Ranks], asked: str) -> None:
    """Ignores and removes an old file, which was meant for the previous attempt."""
    given = ["run", "run.toml", "--set=train.eval_every=99999ep"]
    stopped = ddpforge(*given, "--set=train.length=99999ep", asked, nproc=2, fails=True)
    assert stopped.codes == [ExitCode.PREEMPTED] * 2, stopped.stderr
    assert status()["state"] == "preempted"
    saved = len(list(Path("runs/run/checkpoints").glob("step-*")))
    assert saved == (status()["step"] > 0)  # the time may be up before the first step
    assert not Path("runs/run/STOP").exists()

    Path("runs/run/STOP").touch()
    os.utime("runs/run/STOP", (1, 1))
    done = ddpforge(*given, f"--set=train.length={status()['step'] + 1}st", nproc=2)
    assert status()["state"] == "done"
    assert "STOP is older than this start: removed" in done.stderr
    assert not Path("runs/run/STOP").exists()


def test_stop_request_before_the_rendezvous_ends_all_ranks() -> None:
    def rank(number: int) -> int:
        with StopRequests():
            if number == 1:
                os.kill(os.getpid(), signal.SIGUSR1)
            try:
                package.run("run.toml")
            except ForgeError as error:
                return int(error.exit_code)
        return 0

    assert in_ranks(2, rank) == [ExitCode.PREEMPTED] * 2
    assert not Path("runs").exists()


HANGING = """
import os, signal, time
from ddpforge.builtin.datasets.digits import Digits


class Hanging(Digits):
    \"""Hangs before the third step and sends its process SIGTERM there, as a scheduler does.\"""

    def set_step(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1000)

    def __init__(self):
        super().__init__(split="test")
"""


def test_stop_request_while_waiting_for_data_saves_and_stops(ddpforge: Callable[..., Ranks]) -> None:
    Path("hanging.py").write_text(HANGING)
    sets = ("data.train.use=./hanging.py:Hanging", "~data.eval", "~train.eval_every")
    ended = ddpforge("run", "run.toml", *(f"--set={one}" for one in sets), nproc=1, fails=True)
    assert ended.codes == [ExitCode.PREEMPTED], ended.stderr
    found = status()
    assert (found["state"], found["exit_code"], found["step"]) == ("preempted", ExitCode.PREEMPTED, 2)
    assert len([*Path("runs/run/checkpoints").glob("step-000000002-*")]) == 1


ON_ONE_RANK = """
import os
from ddpforge.interfaces import Callback, GoBack

HERE = os.environ["RANK"] == "1"


class InEvaluation(Callback):
    def on_eval(self, step, metrics):
        return HERE and step == 4


class InStep(Callback):
    def on_step(self, info):
        return HERE and info.step == 3


class GoesBack(Callback):
    goes_back = True

    def __init__(self):
        self.done = False

    def on_step(self, info) -> bool | GoBack:
        if HERE and info.step == 3 and not self.done:
            self.done = True
            return GoBack([3], "rank 1 wants to")
        return info.step == 5


class Undeclared(Callback):
    def on_step(self, info) -> None:
        return HERE and info.step == 3
"""


@pytest.mark.parametrize(("name", "step"), [("InEvaluation", 4), ("InStep", 3), ("GoesBack", 5)])
def test_callback_that_returns_true_on_one_rank_stops_all(ddpforge: Callable[..., Ranks], name: str, step: int) -> None:
    Path("one.py").write_text(ON_ONE_RANK)
    ended = ddpforge("run", "run.toml", f"--set=callbacks.one.use=./one.py:{name}", nproc=2)
    assert ended.codes == [0, 0], ended.stderr
    assert (status()["state"], status()["step"]) == ("done", step)
    assert len([*Path("runs/run/checkpoints").glob(f"step-{step:09}-*")]) == 1
    assert ("rank 1 wants to; back to step 0" in ended.stderr) == (name == "GoesBack")


def test_callback_declared_to_return_none_must_not_return_true(ddpforge: Callable[..., Ranks]) -> None:
    Path("one.py").write_text(ON_ONE_RANK)
    ended = ddpforge("run", "run.toml", "--set=callbacks.one.use=./one.py:Undeclared", nproc=2, fails=True)
    assert ended.codes == [ExitCode.ENVIRONMENT] * 2
    assert "callback `one` returned True from `on_step`, which is declared to return None" in ended.stderr
