"""Cadences by steps and by wall time, and the time per step."""

import pytest
from support.doubles import Loop

from ddpforge.interfaces.durations import Duration, Horizon
from ddpforge.recipe.run_plan import in_steps
from ddpforge.training.cadence import Alarm, Cadence, Stopwatch


class Clock:
    """Clock that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# ---------------------------------------------------------------------------------------------- alarms
def test_an_alarm_rings_from_its_deadline_until_it_is_reset(clock: Clock) -> None:
    alarm = Alarm("checkpoint.every", 60, clock)
    assert not alarm.rings()
    clock.now += 59.9
    assert not alarm.rings()
    clock.now += 0.1
    assert alarm.rings()
    clock.now += 500
    assert alarm.rings()

    alarm.reset()
    assert not alarm.rings()
    clock.now += 60
    assert alarm.rings()


@pytest.mark.parametrize("seconds", [0.0, -5.0])
def test_an_alarm_without_time_left_rings_at_once(clock: Clock, seconds: float) -> None:
    """Example: a run of "2h", resumed after more than two hours."""
    assert Alarm("end", seconds, clock).rings()


# ---------------------------------------------------------------------------------------------- cadences
@pytest.mark.parametrize(
    ("every", "expected"), [("3st", [3, 6, 9, 12]), ("1ep", [4, 8, 12]), ("0.5ep", [2, 4, 6, 8, 10, 12]), ("20st", [])]
)
def test_a_cadence_in_training_time_counts_steps(every: str, expected: list[int]) -> None:
    length = Duration.parse(every)
    cadence = Cadence(
        "train.eval_every", length, {"train.eval_every": in_steps("train.eval_every", length, Horizon(12, 4))}
    )
    assert cadence.alarm is None
    assert [step for step in range(1, 13) if cadence.due(step, rung=())] == expected


def test_a_wall_time_cadence_is_due_when_all_ranks_agree_on_its_alarm(clock: Clock) -> None:
    cadence = Cadence("checkpoint.every", Duration.parse("1m"), {})
    assert cadence.alarm
    assert cadence.alarm.seconds == 60
    cadence.alarm = Alarm(cadence.key, 60, clock)

    clock.now += 61
    assert cadence.alarm.rings()
    assert not cadence.due(1, rung={"train.eval_every"})
    assert cadence.due(2, rung={"train.eval_every", "checkpoint.every"})
    assert not cadence.alarm.rings()  # and starts again


# ---------------------------------------------------------------------------------------------- stopwatches
def test_a_stopwatch_counts_steps_samples_and_training_time(clock: Clock) -> None:
    window = Stopwatch(clock)
    window.steps, window.samples = 1, 64
    clock.now += 2
    window.steps, window.samples = 2, 101
    assert (window.steps, window.samples, window.seconds) == (2, 101, 2)

    window.pause()
    clock.now += 500  # an evaluation
    window.resume()
    clock.now += 1
    assert window.seconds == 3

    window.restart()
    assert (window.steps, window.samples, window.seconds) == (0, 0, 0)


# ---------------------------------------------------------------------------------------------- those of a run
def test_the_alarms_of_a_run_are_its_cadences_in_wall_time_and_its_remaining_time() -> None:
    cadences = Loop(length="1m", checkpoint={"every": "10s"}, train={"eval_every": "2st"}).trainer.cadences
    assert [(alarm.name, alarm.seconds) for alarm in cadences.alarms(45.0)] == [("checkpoint.every", 10), ("end", 15)]
    assert cadences.keys == ["checkpoint.every", "train.eval_every"]
    assert Loop(evaluation=False).trainer.cadences.alarms(0.0) == []


def test_a_run_owes_the_evaluations_at_its_cadence_and_at_its_end() -> None:
    cadences = Loop(steps=5, train={"eval_every": "2st"}).trainer.cadences
    assert [step for step in range(6) if cadences.owes_evaluation(step, end=5)] == [2, 4, 5]
    by_time = Loop(steps=5, train={"eval_every": "10s"}).trainer.cadences
    assert [step for step in range(6) if by_time.owes_evaluation(step, end=5)] == [5]
    without = Loop(steps=5, evaluation=False).trainer.cadences
    assert not any(without.owes_evaluation(step, end=5) for step in range(6))
