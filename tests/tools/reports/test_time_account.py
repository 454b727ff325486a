"""Account of the time of a run: kinds that add up, lost work, waits for a slower rank, and advice with a number."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks
from support.run_folders import made

from ddpforge.runs.folder import RunFolder
from ddpforge.tools.reports.time_account import BETWEEN, LOST, TimeAccount, account_of
from ddpforge.tools.reports.time_advice import advice

BEGAN = 1_000_000.0
STEP = {"data": 1.0, "forward": 2.0, "backward": 3.0, "reduce": 1.0, "optimizer": 1.0}  # seconds of each step


def spent(steps: float, save: float = 0.0) -> dict[str, float]:
    return {"start": 5.0, **{phase: steps * seconds for phase, seconds in STEP.items()}, "save": save}


def attempt(
    began: float, *, first: int, done: int, saves: Sequence[int] = (), rank: int = 0, size: int = 1, **facts: Any
) -> list[dict[str, Any]]:
    """Returns the lines of an attempt: 1 s launch, 2 s import, 5 s start, 8 s a step, 4 s a checkpoint."""
    times = [spent(step - first + 1, 4.0 * number) for number, step in enumerate(saves)]
    last = spent(done - first + 1, 4.0 * len(saves)) if first else {"start": 5.0}
    head = {"attempt": f"at {began}", "rank": rank, "size": size, "device": "cpu", "cores": 4}
    newest: dict[str, Any] = {"first": first, "done": done, "workers": 0, "exposed": 0.0, "phase": "forward"}
    return [
        head | {"launched": began - 3, "created": began - 2, "began": began},
        *({"save": step, "at": sum(time.values()), "spent": time} for step, time in zip(saves, times, strict=True)),
        newest | {"at": sum(last.values()), "spent": last} | facts,
    ]


def run_with(path: Path, *attempts: list[dict[str, Any]], others: Mapping[int, list[dict[str, Any]]] = {}) -> RunFolder:
    folder = made(path)
    folder.logs.mkdir(exist_ok=True)
    for rank, lines in {0: [line for one in attempts for line in one], **others}.items():
        (folder.logs / f"time-rank-{rank}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def read(folder: RunFolder) -> TimeAccount:
    found = account_of(folder)
    assert found is not None
    for one in found.attempts:
        assert sum(one.seconds.values()) == pytest.approx(one.end - one.start, abs=1e-3)
    assert sum(found.seconds.values()) == pytest.approx(found.whole, abs=1e-3)
    return found


def test_kinds_of_time_add_up_to_the_time_from_the_first_start_to_the_end(tmp_path: Path) -> None:
    found = read(run_with(tmp_path / "run", attempt(BEGAN, first=1, done=10, saves=[10], ended="done")))
    assert found.whole == pytest.approx(3 + 5 + 80 + 4)
    assert found.explained == 1
    expected = {"launch": 1, "import": 2, "start": 5, "data": 10, "forward": 20, "backward": 30}
    expected |= {"communication": 10, "optimizer": 10, "save": 4}
    assert {kind: seconds for kind, seconds, _ in found.shares()} == pytest.approx(expected)
    assert list(dict.fromkeys(kind for kind, *_ in found.shares())) == list(expected)


def test_time_that_no_phase_explains_is_other(tmp_path: Path) -> None:
    lines = attempt(BEGAN, first=1, done=10, ended="done")
    lines[-1]["at"] += 8.0
    found = read(run_with(tmp_path / "run", lines))
    assert found.seconds["other"] == pytest.approx(8)
    assert found.explained == pytest.approx(1 - 8 / 96)


def test_steps_after_the_resumed_checkpoint_are_lost_work_and_their_checkpoint_is_not(tmp_path: Path) -> None:
    killed = attempt(BEGAN, first=1, done=9, saves=[3, 6])
    found = read(run_with(tmp_path / "run", killed, attempt(BEGAN + 500, first=7, done=10, saves=[10], ended="done")))
    assert [one.lost_steps for one in found.attempts] == [3, 0]
    assert found.seconds[LOST] == pytest.approx(3 * 8)
    assert found.seconds["save"] == pytest.approx(3 * 4)
    assert found.seconds["forward"] == pytest.approx(10 * 2)  # of each step once
    assert found.seconds[BETWEEN] == pytest.approx(500 - 3 - (5 + 9 * 8 + 8))
    assert str(found.attempts[0]) == "steps 1 to 9 (3 of them lost), killed"


def test_a_checkpoint_that_was_not_complete_is_lost_work_too(tmp_path: Path) -> None:
    killed = attempt(BEGAN, first=1, done=9, saves=[3, 6])
    found = read(run_with(tmp_path / "run", killed, attempt(BEGAN + 500, first=4, done=10, ended="done")))
    assert found.attempts[0].lost_steps == 6
    assert found.seconds[LOST] == pytest.approx(6 * 8 + 4)


def test_work_of_all_attempts_after_the_resumed_checkpoint_is_lost(tmp_path: Path) -> None:
    # The second attempt is killed before it saves, the third before its first step.
    found = read(
        run_with(
            tmp_path / "run",
            attempt(BEGAN, first=1, done=5, saves=[3], ended="RuntimeError"),
            attempt(BEGAN + 200, first=4, done=6),
            attempt(BEGAN + 300, first=0, done=0),
            attempt(BEGAN + 400, first=4, done=10, saves=[10], ended="done"),
        )
    )
    assert [one.lost_steps for one in found.attempts] == [2, 3, 0, 0]
    assert found.seconds[LOST] == pytest.approx(5 * 8)
    assert [str(one) for one in found.attempts[:3]] == [
        "steps 1 to 5 (2 of them lost), failed with RuntimeError",
        "steps 4 to 6 (3 of them lost), killed",
        "no step, killed",
    ]


def test_a_killed_run_that_nothing_continues_has_lost_the_steps_after_its_newest_checkpoint(tmp_path: Path) -> None:
    found = read(run_with(tmp_path / "run", attempt(BEGAN, first=1, done=5)))  # which has none
    assert found.attempts[0].lost_steps == 5
    assert found.seconds[LOST] == pytest.approx(40)


def test_the_launch_of_restarted_ranks_counts_once(tmp_path: Path) -> None:
    # A launcher that restarts ranks has begun before the end of the attempt before.
    first, second = attempt(BEGAN, first=1, done=2, saves=[2]), attempt(BEGAN + 60, first=3, done=4, ended="done")
    second[0]["launched"] = first[0]["launched"]
    found = read(run_with(tmp_path / "run", first, second))
    assert found.seconds["launch"] == pytest.approx(1)
    assert found.seconds[BETWEEN] == pytest.approx(60 - 2 - (5 + 16 + 4))


def test_lines_that_a_crash_cut_off_are_skipped(tmp_path: Path) -> None:
    folder = run_with(tmp_path / "run", attempt(BEGAN, first=1, done=2, saves=[2]))
    with (folder.logs / "time-rank-0.jsonl").open("a") as file:
        file.write('{"at": 5')
    assert read(folder).attempts[0].done == 2


def test_runs_of_earlier_versions_have_no_account(tmp_path: Path) -> None:
    assert account_of(made(tmp_path / "run")) is None


def of_two_ranks(path: Path) -> TimeAccount:
    """Two ranks; a reduction takes 0.1 s, and rank 0 arrives 0.9 s before rank 1, but for the last step."""
    lines = [attempt(BEGAN, first=1, done=10, size=2, rank=rank, ended="done") for rank in (0, 1)]
    for one, waits, exposed in zip(lines, ([1.0] * 9 + [0.1], [0.1] * 10), (9.1, 1.0), strict=True):
        one[-1]["exposed"] = exposed
        one.insert(1, {"waits": [[step, round(1e6 * wait)] for step, wait in enumerate(waits, start=1)]})
    return read(run_with(path, lines[0], others={1: lines[1]}))


def test_waiting_for_a_slower_rank_is_apart_from_the_communication_itself(tmp_path: Path) -> None:
    found = of_two_ranks(tmp_path / "run")
    assert found.waits == pytest.approx({0: 8.1, 1: 0.0})
    assert found.seconds["waiting"] == pytest.approx(8.1)
    assert found.seconds["communication"] == pytest.approx(10 - 8.1)
    assert found.slowest == "rank 1 waited least for gradients, 0.0 s; rank 0 8.1 s"


# ---------------------------------------------------------------------------------------------- advice
def helps(found: TimeAccount, words: str) -> list[str]:
    return [str(one) for one in advice(found) if words in str(one)]


def test_advice_on_saves_has_the_interval_of_young_and_daly(tmp_path: Path) -> None:
    """Stall of 4 s, one failure in 64 s of steps: an interval of sqrt(2 * 4 * 64) = 22.6 s, three steps of 8 s."""
    attempts = [attempt(BEGAN + 200 * n, first=1, done=8, saves=[8] if n == 3 else []) for n in range(4)]
    attempts[3][-1]["ended"] = "done"
    found = read(run_with(tmp_path / "run", *attempts))
    (text,) = helps(found, "save every")
    interval = (2 * 4 * 4 * 64 / 3) ** 0.5
    assert text.startswith(f'save every {interval:.0f} s, checkpoint.every = "{round(interval / 8)}st" in place of')
    before, after = 4 / 256 + 256 / (2 * 256 / 3), 4 / interval + interval / (2 * 256 / 3)
    assert f"{100 * (before - after):.0f} % less time in lost work and saves" in text


def test_advice_on_loader_processes_has_the_speed_of_a_step_without_the_wait(tmp_path: Path) -> None:
    """1 s of 8 s is data: one process makes it in the meantime, so that a step takes 7 s."""
    found = read(run_with(tmp_path / "run", attempt(BEGAN, first=1, done=10, ended="done")))
    assert helps(found, "data.workers") == [
        "data.workers = 1 in place of 0: steps up to 14 % faster, because 12 % of a step waits for data"
    ]


def test_advice_names_the_slow_rank_and_the_speed_without_it(tmp_path: Path) -> None:
    found = of_two_ranks(tmp_path / "run")
    (text,) = helps(found, "rank 1 is the slowest")
    assert text.endswith(f"steps {100 * (80 / (80 - 8.1) - 1):.0f} % faster")


@pytest.mark.parametrize("words", ["save every", "data.workers", "evaluate", "slowest"])
def test_there_is_no_advice_without_a_measured_gain(tmp_path: Path, words: str) -> None:
    """No failure, no wait for data, no evaluation, one rank."""
    lines = attempt(BEGAN, first=1, done=10, saves=[10], ended="done")
    for line in lines[1:]:
        line["spent"]["data"] = 0.0
    assert helps(read(run_with(tmp_path / "run", lines)), words) == []


# ---------------------------------------------------------------------------------------------- real runs
KILLED = """
import json, os, signal, time
from pathlib import Path
import torch
from torch import nn

class Net(nn.Module):
    '''At the seventh step of a new run, kills its process once the record of time has the six others.'''
    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(64, 10), 0
    def forward(self, x):
        self.passes += self.training
        if self.passes == 7 and not Path("killed").exists():
            lines = Path("runs/run/logs/time-rank-0.jsonl")
            while json.loads(lines.read_text().splitlines()[-1]).get("done") != 6:
                time.sleep(0.01)
            Path("killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.layer(x.flatten(1))
"""
RECIPE = """
recipe = 2
name = "run"
model = { use = "./net.py:Net" }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "8st", global_batch = 8 }
checkpoint = { every = "4st" }
"""


def test_time_of_a_run_that_is_killed_and_resumed_adds_up(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(KILLED)
    (tmp_path / "run.toml").write_text(RECIPE)
    assert ddpforge("run", "run.toml", fails=True).codes == [-9]
    ddpforge("run", "run.toml")
    found = read(RunFolder(tmp_path / "runs/run"))
    assert found.explained >= 0.995
    assert [(one.resumed, one.done, one.lost_steps, one.ended) for one in found.attempts] == [
        (0, 6, 2, None),
        (4, 8, 0, "done"),
    ]
    for kind in ("start", "data", "forward", "backward", "optimizer", "save", LOST, BETWEEN):
        assert found.seconds[kind] > 0, kind
    shown = ddpforge("status", "run", "--time").stdout
    assert "attempt 1: steps 1 to 6 (2 of them lost), killed" in shown
    assert json.loads(ddpforge("status", "run", "--time", "--json").stdout)["lost_steps"] == 2


def test_ranks_record_their_waits_for_gradients_under_ddp(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    """Rank 1 sleeps in each forward pass."""
    slow = KILLED.replace("self.passes += self.training", 'time.sleep(0.05 * (os.environ["RANK"] == "1"))')
    (tmp_path / "net.py").write_text(slow)
    (tmp_path / "run.toml").write_text(RECIPE)
    ddpforge("run", "run.toml", nproc=2)
    found = read(RunFolder(tmp_path / "runs/run"))
    assert set(found.waits) == {0, 1}
    assert found.waits[0] > 0.2  # of 8 * 0.05 s
    assert found.slowest.startswith("rank 1 waited least")


FAULTY = """
import os, resource, signal, threading
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
from ddpforge.interfaces import Callback

def strike(place, count):
    '''Causes the fault of the environment on the last rank, once.'''
    where, how, times = os.environ["FAULT"].split()
    rank, last = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1")) - 1
    struck = Path("struck")
    if where != place or rank != last or count < 7 or struck.exists() and len(struck.read_text()) >= int(times):
        return
    with struck.open("a") as file:
        file.write("x")
    if how == "raise":
        raise RuntimeError("planted")
    if how == "hang":
        threading.Event().wait()
    if how == "full":  # writes beyond this size fail, as on a full disk
        return resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}[how])

class Data(Dataset):
    read = 0
    def __len__(self):
        return 512
    def __getitem__(self, index):
        self.read += 1
        strike("data", self.read // 8)
        return torch.full((16,), index / 512), index % 10

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        strike("start", 7)
        self.layer, self.trained, self.evaluated = nn.Linear(16, 10), 0, 0
    def forward(self, x):
        self.trained += self.training
        self.evaluated += self.training is False and self.trained > 0
        strike("forward", self.trained) if self.training else strike("evaluation", 7 * (self.evaluated > 1))
        return self.layer(x)

class Saved(Callback):
    def on_checkpoint(self, step, folder):
        strike("save", 2 * step)
"""
FAULTS = [
    *("forward kill 1", "forward term 1", "forward int 1", "forward raise 1", "forward full 1", "data kill 1"),
    *("data raise 1", "start kill 1", "start raise 1", "evaluation kill 1", "evaluation raise 1", "save kill 1"),
    *("save raise 1", "forward kill 2"),
]
FAULTS_OF_TWO = [
    *("forward kill 1", "forward raise 1", "forward hang 1", "data hang 1", "evaluation kill 1", "forward term 1"),
]
FAULTY_RECIPE = """
recipe = 2
name = "run"
model = { use = "./faulty.py:Net" }
data.train = { use = "./faulty.py:Data" }
data.eval = { use = "./faulty.py:Data" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "12st", global_batch = 16, eval_every = "4st", hang_timeout = "5s" }
checkpoint = { every = "4st" }
callbacks.saved = { use = "./faulty.py:Saved" }
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("fault", "ranks"), [*((fault, 1) for fault in FAULTS), *((fault, 2) for fault in FAULTS_OF_TWO)]
)
def test_time_of_a_faulted_run_adds_up(ddpforge: Callable[..., Ranks], tmp_path: Path, fault: str, ranks: int) -> None:
    """From the first start that had a folder to the end, at least 99.5 % of the time has a kind."""
    (tmp_path / "faulty.py").write_text(FAULTY)
    (tmp_path / "run.toml").write_text(FAULTY_RECIPE)
    began = time.time()
    for _ in range(int(fault[-1])):
        assert any(ddpforge("run", "run.toml", nproc=ranks, fails=True, env={"FAULT": fault}).codes)
    ddpforge("run", "run.toml", nproc=ranks, env={"FAULT": fault})
    outside = time.time() - began
    found = read(RunFolder(tmp_path / "runs/run"))
    print(f"{fault}, {ranks} ranks: {found.explained:.2%} of {found.whole:.2f} s; seen from outside {outside:.2f} s")
    print({kind: round(seconds, 2) for kind, seconds, _ in found.shares()}, *found.attempts, sep="; ")
    assert found.explained >= 0.995
    assert found.whole <= outside + 0.1
    assert found.attempts[-1].ended == "done"
    assert found.attempts[-1].done == 12
    if not fault.startswith("start"):  # such a run has no folder before
        assert found.seconds[BETWEEN] > 0
        assert len(found.attempts) == 1 + int(fault[-1])
