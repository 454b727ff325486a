"""`on_end` is called once for every callback that started, and status.json has the result of the last attempt."""

import json
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
data.eval = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "4st", global_batch = 12 }
checkpoint.every = "2st"
[callbacks.first]
use = "./hearing.py:Hears"
name = "first"
[callbacks.second]
use = "./hearing.py:Hears"
name = "second"
"""
HEARING = """
from ddpforge.interfaces import Callback


class Hears(Callback):
    def __init__(self, name: str, fails: str = "") -> None:
        self.name, self.fails = name, fails

    def note(self, what, rank):
        with open(f"heard-{rank}.txt", "a") as file:
            print(self.name, what, file=file)

    def on_start(self, run):
        self.rank = run.world.global_ranks.rank
        if self.fails == "on_start":
            raise KeyError("start")
        self.note("started", run.world.global_ranks.rank)

    def on_step(self, info):
        if self.fails == f"on_step {info.step}":
            raise KeyError("step")

    def on_end(self, error):
        self.note(f"ended: {error!r}", self.rank)
        if self.fails in ("on_end", f"on_end of {self.rank}"):
            raise KeyError("end")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)
    Path("hearing.py").write_text(HEARING)
    return tmp_path


def callback_calls(rank: int = 0) -> list[str]:
    return Path(f"heard-{rank}.txt").read_text().splitlines()


def status() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path("runs/run/status.json").read_text())
    return found


STARTED = ["first started", "second started"]


def test_on_end_is_called_once_after_success(ddpforge: Callable[..., Ranks]) -> None:
    ddpforge("run", "run.toml")
    assert callback_calls() == [*STARTED, "second ended: None", "first ended: None"]

    Path("heard-0.txt").unlink()
    ddpforge("eval", "run")
    assert callback_calls() == [*STARTED, "second ended: None", "first ended: None"]


def test_callback_that_fails_in_on_end_fails_the_run(ddpforge: Callable[..., Ranks]) -> None:
    failed = ddpforge("run", "run.toml", "--set", "callbacks.second.fails=on_end", nproc=2, fails=True)
    assert failed.codes == [ExitCode.FAILED] * 2
    for rank in range(2):
        assert callback_calls(rank) == [*STARTED, "second ended: None", "first ended: KeyError('end')"]
    assert (status()["state"], status()["step"]) == ("failed", 4)
    assert status()["error"] in ("rank 0: KeyError: 'end'", "rank 1: KeyError: 'end'")


@pytest.mark.parametrize("rank", [0, 1])
def test_run_is_not_done_if_one_rank_fails_at_the_end(ddpforge: Callable[..., Ranks], rank: int) -> None:
    failed = ddpforge("run", "run.toml", "--set", f"callbacks.first.fails=on_end of {rank}", nproc=2, fails=True)
    assert failed.codes == [ExitCode.FAILED] * 2
    assert (status()["state"], status()["error"]) == ("failed", f"rank {rank}: KeyError: 'end'")
    assert f"rank {rank}" in failed.stderr or rank == 0
    assert failed.stderr.count("Traceback") == 1
    assert failed.stdout == ""


@pytest.mark.parametrize("command", ["run", "eval"])
def test_on_end_receives_the_error_of_a_later_callback_in_on_start(
    ddpforge: Callable[..., Ranks], command: str
) -> None:
    if command == "eval":
        ddpforge("run", "run.toml")
        Path("heard-0.txt").unlink()
    arguments = ["run", "run.toml"] if command == "run" else ["eval", "run"]
    failed = ddpforge(*arguments, "--set", "callbacks.second.fails=on_start", fails=True)
    assert failed.codes == [ExitCode.FAILED]
    assert callback_calls() == ["first started", "first ended: KeyError('start')"]


def test_status_is_that_of_the_last_attempt_and_keeps_step_and_metrics(
    ddpforge: Callable[..., Ranks],
) -> None:
    ddpforge("run", "run.toml", "--set", "callbacks.first.fails=on_step 3", fails=True)
    assert (status()["state"], status()["step"], status()["error"]) == ("failed", 3, "rank 0: KeyError: 'step'")
    metrics = status()["metrics"]
    assert metrics

    ddpforge("run", "run.toml", "--set", "callbacks.first.fails=on_start", fails=True)
    assert (status()["state"], status()["step"], status()["error"]) == ("failed", 3, "rank 0: KeyError: 'start'")
    assert status()["metrics"] == metrics

    Path("runs/run/checkpoints").rename("aside")
    Path("runs/run/checkpoints").write_text("")
    ddpforge("run", "run.toml", nproc=2, fails=True)
    assert "CheckpointError: the folder of checkpoints cannot be read" in status()["error"]


def test_rows_have_the_attempt_number_of_run_json(ddpforge: Callable[..., Ranks]) -> None:
    """Counts an attempt that has written no row in both places."""
    for length in ("2st", "4st"):
        ddpforge("run", "run.toml", "--set", f"train.length={length}")
    ddpforge("run", "run.toml", "--set", "train.length=6st", "--set", "callbacks.first.fails=on_step 5", fails=True)
    ddpforge("run", "run.toml", "--set", "train.length=6st")
    rows = [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    attempts = json.loads(Path("runs/run/run.json").read_text())["attempts"]
    assert attempts == 4
    assert rows[-1]["attempt"] == attempts
