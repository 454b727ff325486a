"""Slow ranks: the rule that names them, the seconds of a rank's own work, and a run with a planted slow rank."""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ddpforge.api import read_metrics
from ddpforge.cli.status import status
from ddpforge.features import slow_ranks
from ddpforge.features.slow_ranks import SlowRank, SlowRankRule, slowest
from ddpforge.interfaces import device_kind
from ddpforge.testing.ranks import run_ddpforge

STEP = 0.1  # seconds of work of a usual rank


def windows(rule: SlowRankRule, work: Callable[[int], list[list[float]]], number: int = 5) -> list[Any]:
    """Adds windows of ten steps, whose work per step is `work(rank)`; returns the results that are not empty."""
    found = []
    for window in range(number):
        result = rule.add([[10 * part for part in parts] for parts in work(window)], 10, 10 * STEP)
        found += [result] if any(result) else []
    return found


def ranks(*seconds: float, part: int = 1) -> list[list[float]]:
    """Returns the work of ranks; what exceeds STEP is in `part`."""
    usual = [0.2 * STEP, 0.6 * STEP, 0.2 * STEP]
    return [[own + (one - STEP) * (i == part) for i, own in enumerate(usual)] for one in seconds]


# ---------------------------------------------------------------------------------------------- rule
@pytest.mark.parametrize("part", range(3))
def test_slow_rank_is_named_once_with_factor_and_part_after_five_windows(part: int) -> None:
    rule, work = SlowRankRule(4), ranks(STEP, STEP, 1.5 * STEP, STEP, part=part)
    assert windows(rule, lambda _: work, 4) == []
    (((named,), recovered),) = windows(rule, lambda _: work, 20)
    assert (named.rank, named.part, list(recovered)) == (2, slow_ranks.PARTS[part], [])
    assert named.factor == pytest.approx(1.5)
    assert (named.seconds, named.usual) == (pytest.approx(0.15), pytest.approx(0.1))


def test_rank_that_recovers_is_named_again_if_it_becomes_slow_again() -> None:
    rule, slow, usual = SlowRankRule(4), ranks(STEP, 2 * STEP, STEP, STEP), ranks(*4 * [STEP])
    assert [len(named) for named, _ in windows(rule, lambda _: slow)] == [1]
    assert windows(rule, lambda _: usual, 4) == []
    assert [list(recovered) for _, recovered in windows(rule, lambda _: usual, 20)] == [[1]]
    assert [len(named) for named, _ in windows(rule, lambda _: slow)] == [1]


def test_of_two_ranks_only_a_clear_excess_over_the_faster_one_is_slow() -> None:
    assert windows(SlowRankRule(2), lambda _: ranks(STEP, 1.35 * STEP), 50) == []
    (((named,), _),) = windows(SlowRankRule(2), lambda _: ranks(STEP, 1.5 * STEP), 50)
    assert named.rank == 1


def test_half_of_the_ranks_may_be_slow() -> None:
    """As on one of two hosts; mean and standard deviation would not see it."""
    (named, _), *_ = windows(SlowRankRule(4), lambda _: ranks(STEP, STEP, 2 * STEP, 2.1 * STEP))
    assert [one.rank for one in named] == [2, 3]


def test_excess_that_no_step_feels_is_not_slow() -> None:
    """Less than a twentieth of the wall time, such as data and callbacks next to long passes of a pipeline."""
    rule = SlowRankRule(4)
    found = [rule.add([[0.01, 0.0, 0.0]] * 3 + [[0.04, 0.0, 0.0]], 10, 1.0) for _ in range(20)]
    assert not any(map(any, found))


def test_short_intervals_make_one_window() -> None:
    """Covers a run that logs every step: it compares seconds, not single steps."""
    rule, work = SlowRankRule(4), ranks(STEP, STEP, STEP, 2 * STEP)
    assert [bool(rule.add(work, 1, 0.125)[0]) for _ in range(60)].index(True) == 5 * 8 - 1


def noise(kind: str, draw: random.Random, state: dict[str, Any], count: int) -> list[list[float]]:
    """Returns the work of a step with noise, the same distribution on every rank."""
    if kind == "bursts" and state.setdefault("left", 0) <= 0 and draw.random() < 0.002:
        state["rank"], state["left"] = draw.randrange(count), draw.randint(1, 30)  # steps: up to three windows
    state["left"] = state.get("left", 0) - 1
    found = []
    for rank in range(count):
        seconds = STEP * draw.lognormvariate(0, 0.15)
        if kind == "heavy tails":
            seconds += 0.02 * STEP * (draw.paretovariate(1.3) - 1)
        elif kind == "lengths":  # sequences of other lengths
            seconds *= draw.choice([0.3, 1, 1, 3])
        elif kind == "bursts" and state["left"] > 0 and rank == state["rank"]:
            seconds *= 3
        found.append([0.0, seconds, 0.0])
    return found


@pytest.mark.parametrize("kind", ["usual", "heavy tails", "lengths", "bursts"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_noise_of_a_hundred_thousand_steps_names_no_rank(kind: str, count: int) -> None:
    """25,000 steps of each kind and number of ranks, 300,000 together."""
    draw, state, rule = random.Random(f"{kind} {count}"), dict[str, Any](), SlowRankRule(count)
    named = [found for _ in range(25_000) for found in rule.add(noise(kind, draw, state, count), 1, STEP)[0]]
    assert named == []


@pytest.mark.parametrize("kind", ["usual", "heavy tails", "lengths", "bursts"])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_rank_that_is_much_slower_is_named_in_noise(kind: str, count: int) -> None:
    draw, state, rule = random.Random(f"{kind} {count}"), dict[str, Any](), SlowRankRule(count)
    named: list[SlowRank] = []
    for _ in range(1000):
        work = noise(kind, draw, state, count)
        work[1][0] += STEP * (4 if kind == "lengths" else 1)  # these vary by 1 STEP
        named += rule.add(work, 1, STEP)[0]
    assert {one.rank for one in named} == {1}
    assert {one.part for one in named} == {"data"}


def test_row_has_the_rank_with_the_most_work_even_if_it_is_not_slow() -> None:
    found = slowest(ranks(STEP, 1.1 * STEP, STEP), 1)
    assert found is not None
    assert found.rank == 1
    assert found.factor == pytest.approx(1.1)
    assert slowest([[0.0, 0.0, 0.0]] * 3, 1) is None


# ---------------------------------------------------------------------------------------------- device
class Event:
    """Timed event of a device that runs behind: its time is known once the clock has reached it."""

    now, recorded = 0.0, 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 5
        self.at = Event.recorded

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, end: "Event") -> float:
        assert end.query(), "torch waits for the device, or raises"
        return end.at - self.at


def test_spans_of_a_device_are_read_once_they_are_over() -> None:
    kind = SimpleNamespace(name="cuda", module=SimpleNamespace(Event=Event))
    spans = slow_ranks._Spans(kind)  # type: ignore[arg-type]
    spans.end()  # without a beginning: nothing
    for _ in range(2):
        spans.begin()
        spans.end()
    Event.now = 10
    assert spans.take() == pytest.approx(0.005)
    assert spans.take() == 0
    Event.now = 20
    assert spans.take() == pytest.approx(0.005)


def test_spans_of_the_host_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1.0, 3.0, 10.0, 11.0])
    monkeypatch.setattr(slow_ranks, "perf_counter", lambda: next(times))
    spans = slow_ranks._Spans(device_kind("cpu"))
    for _ in range(2):
        spans.begin()
        spans.end()
    assert spans.take() == 3.0


# ---------------------------------------------------------------------------------------------- runs
CODE = """
import os
import time

import torch


class Data:
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        time.sleep(0.08 if os.environ["RANK"] == "1" else 0.02)  # of its disk
        return torch.full((4,), float(index % 7)), index % 3
"""
RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 4
outputs = 3
[data.train]
use = "./parts.py:Data"
[task]
use = "classification"
[optimizer]
use = "sgd"
lr = 0.01
[train]
length = "140st"
global_batch = 2
device = "cpu"
[strategy]
use = "{strategy}"
[checkpoint]
every = "1000st"
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_run_names_the_rank_with_the_slow_disk(tmp_path: Path, strategy: str) -> None:
    """Lets a rank sleep four times as long as the other one, which no load of the machine reverses."""
    (tmp_path / "parts.py").write_text(CODE)
    (tmp_path / "run.toml").write_text(RECIPE.format(strategy=strategy))
    done = run_ddpforge("run", "run.toml", cwd=tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "runs/run"
    (one,) = json.loads((folder / "slow_ranks.json").read_text())["named"]
    assert (one["rank"], one["part"], one["until"]) == (1, "data", None)
    assert done.stderr.count("is slow: its own work takes") == 1
    last = read_metrics(folder)[-1]
    assert last["perf/slowest_rank"] == 1
    assert last["perf/slowest_factor"] > 1.4
    shown = CliRunner().invoke(status, [str(folder)]).output
    assert re.search(rf"slow rank +rank 1 on {one['host']} is slow", shown)
    (named,) = json.loads(CliRunner().invoke(status, [str(folder), "--json"]).output)["slow_ranks"]
    assert named == one


def test_damaged_file_of_slow_ranks_hides_nothing_else(tmp_path: Path) -> None:
    for text in ("{", '{"named": 3}', '{"named": [{"text": 1, "since": 2, "until": null}]}'):
        (tmp_path / "run.json").write_text("{}")
        (tmp_path / "slow_ranks.json").write_text(text)
        shown = CliRunner().invoke(status, [str(tmp_path)])
        assert shown.exit_code == 0, shown.output
        assert "slow rank" not in shown.output
