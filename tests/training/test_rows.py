"""Breakdown of the wall time between two rows: shares by phase, across ranks."""

from __future__ import annotations

from typing import Any

import pytest
from support.doubles import Clock, Loop, Sums
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.ranks import heartbeat
from ddpforge.training.cadence import Stopwatch
from ddpforge.training.progress import Progress
from ddpforge.training.rows import TimeBreakdown


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replaces the clock that measures phases."""
    clock = Clock()
    monkeypatch.setattr(heartbeat, "perf_counter", clock)
    heartbeat.beat(heartbeat.START)
    return clock


def stay(clock: Clock, phase: int, seconds: float) -> None:
    heartbeat.beat(phase)
    clock.now += seconds


def test_time_shares_cover_the_time_since_the_last_row(clock: Clock) -> None:
    stay(clock, heartbeat.EVAL, 100.0)
    spending = TimeBreakdown()
    for phase, seconds in (
        (heartbeat.DATA, 3.0),
        (heartbeat.FORWARD, 2.0),
        (heartbeat.DATA, 1.0),
        (heartbeat.BACKWARD, 4.0),
    ):
        stay(clock, phase, seconds)
    found, items = TimeBreakdown.taken(spending.totals({}, counts=False))
    shares = {"data": 0.4, "forward": 0.2, "backward": 0.4, "optimizer": 0.0, "reduce": 0.0, "callbacks": 0.0}
    assert found == pytest.approx(shares)
    assert items is None

    stay(clock, heartbeat.SAVE, 1.0)
    again, _ = TimeBreakdown.taken(spending.totals({}, counts=False))
    assert again == pytest.approx({**dict.fromkeys(shares, 0.0), "save": 1.0})


def test_time_shares_are_zero_if_no_time_passed(clock: Clock) -> None:
    found, _ = TimeBreakdown.taken(TimeBreakdown().totals({}, counts=False))
    assert set(found.values()) == {0.0}


def test_time_shares_are_removed_from_the_means() -> None:
    means = {"loss": 0.5, "?time/data": 0.25, "?items": 100.0}
    assert TimeBreakdown.taken(means) == ({"data": 0.25}, 100.0)
    assert means == {"loss": 0.5}


def test_a_heartbeat_follower_receives_every_phase_until_it_is_removed() -> None:
    seen: list[int] = []
    heartbeat.follow(seen.append)
    heartbeat.beat(heartbeat.DATA)
    heartbeat.beat(heartbeat.STEP)
    heartbeat.follow(None)
    heartbeat.beat(heartbeat.SAVE)
    assert seen == [heartbeat.DATA, heartbeat.STEP]


def test_a_row_has_the_time_shares_of_its_steps(clock: Clock) -> None:
    """Reading a batch takes three seconds, an update one. The evaluation after step 2 belongs to the next row."""
    loop = Loop(steps=4, track="1st", train={"eval_every": "2st"})
    training: Any = loop.trainer.stepping.training
    fetch, update = training.training, loop.replica.step

    def slowly(start: int) -> Any:
        for micro in fetch(start):
            clock.now += 3.0
            yield micro

    def step() -> Tensor:
        clock.now += 1.0
        return update()

    loop.trainer.stepping.training = type("Slow", (), {"training": staticmethod(slowly)})()  # type: ignore[assignment]
    loop.replica.step = step  # type: ignore[method-assign]
    loop.trainer.evaluator._means = lambda *_: clock.__dict__.update(now=clock.now + 4.0) or {}  # type: ignore[method-assign]
    loop.fit()
    rows = {step: row for step, row in loop.tracker.rows if "lr" in row}
    assert [rows[step]["train/time/data"] for step in (1, 2, 3, 4)] == pytest.approx([0.75, 0.75, 0.375, 0.75])
    assert [rows[step]["train/time/optimizer"] for step in (1, 2, 3, 4)] == pytest.approx([0.25, 0.25, 0.125, 0.25])
    assert rows[3]["train/time/eval"] == pytest.approx(0.5)
    assert "train/time/eval" not in rows[2]


def test_waiting_for_data_is_logged_once_with_a_hint(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    """Reading a batch takes three seconds, an update one. A row has two steps, except for those of steps 1 and 2."""
    loop = Loop(steps=8, track="2st", evaluation=False)
    loop.trainer.rows.stopwatch = Stopwatch(clock)
    training: Any = loop.trainer.stepping.training
    fetch, update = training.training, loop.replica.step

    def slowly(start: int) -> Any:
        for micro in fetch(start):
            clock.now += 3.0
            yield micro

    def step() -> Tensor:
        clock.now += 1.0
        return update()

    loop.trainer.stepping.training = type("Slow", (), {"training": staticmethod(slowly)})()  # type: ignore[assignment]
    loop.replica.step = step  # type: ignore[method-assign]
    loop.fit()
    (said,) = [record.getMessage() for record in caplog.records if "waiting for data" in record.getMessage()]
    assert said.startswith("step 4: 75% of the time goes into waiting for data: set data.workers = 2")


@pytest.mark.parametrize(("waited", "seconds"), [(0.2, 60.0), (0.9, 1.0)])
def test_short_waits_give_no_hint(waited: float, seconds: float) -> None:
    assert TimeBreakdown().advice(waited, seconds, workers=0) == ""


class Words(Sums):
    """Task whose samples have as many words as their value."""

    items = "words"

    def count(self, batch: Tensor) -> Tensor:
        return batch.sum()


def test_items_other_than_samples_are_counted_per_second() -> None:
    """Each row has the items of its own step; a row over two steps counts these for both."""
    loop = Loop(steps=4, batch=4, track="2st", evaluation=False, task=Words())
    loop.trainer.rows.stopwatch = Stopwatch(loop.clock)
    update = loop.replica.step

    def step() -> Tensor:
        loop.clock.now += 2.0
        return update()

    loop.replica.step = step  # type: ignore[method-assign]
    loop.fit()
    for _, row in loop.tracker.rows:
        words = 4 * row["train/x"]
        assert row["train/words_per_second"] == pytest.approx(words / 2)
        assert row["train/samples_per_second"] == pytest.approx(2.0)


def test_samples_as_items_have_no_separate_column() -> None:
    loop = Loop(steps=1)
    loop.fit()
    assert [name for name in loop.tracker.rows[0][1] if name.endswith("_per_second")] == ["train/samples_per_second"]


def test_steps_without_a_target_are_counted_anew_after_a_rollback(caplog: pytest.LogCaptureFixture) -> None:
    rows = Loop(steps=40).trainer.rows
    rows.restart(0)
    rows.take({"?empty": 3.0}, Progress(step=5), 40)
    rows.restart(4)
    rows.take({"?empty": 1.0}, Progress(step=8), 40)
    said = [record.getMessage() for record in caplog.records if "no target counted" in record.getMessage()]
    assert [one.split(":")[0] for one in said] == [
        "by step 5 no target counted in 3 of 5 updates",
        "by step 8 no target counted in 1 of 4 updates",
    ]


# ---------------------------------------------------------------------------------------------- targets
class Above(Sums):
    """Counts only samples of at least `least`."""

    def __init__(self, least: float) -> None:
        self.least = least

    def count(self, batch: Any) -> Tensor:
        return (batch >= self.least).sum()


def test_a_run_without_valid_targets_is_refused_after_its_last_step() -> None:
    loop = Loop(steps=6, task=Above(1e9), evaluation=False)
    with pytest.raises(UsageError, match="no target has counted in 6 steps"):
        loop.fit()
    assert loop.tracker.steps() == [1, 2, 3, 4, 5], "the rows before are logged"


def test_a_run_without_valid_targets_is_refused_after_100_steps() -> None:
    loop = Loop(steps=300, task=Above(1e9), evaluation=False, track="50st")
    with pytest.raises(UsageError, match="no target has counted in 100 steps"):
        loop.fit()


def test_steps_without_valid_targets_are_logged_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop(steps=6, task=Above(3), evaluation=False, track="6st")
    assert loop.fit() == "done"
    assert [record.message for record in caplog.records if "no target" in record.message][-1].startswith(
        "by step 6 no target counted in 3 of 6 updates"
    )


def test_the_last_steps_of_a_resumed_run_may_have_no_valid_target() -> None:
    loop = Loop(steps=6, task=Above(1e9), evaluation=False)
    loop.trainer.progress.step = 4
    assert loop.fit() == "done"
