"""Cadences in steps or in wall time, and the measurement of training speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.run_plan import RunPlan
from ddpforge.recipe.schema import Recipe

__all__ = ["Alarm", "Cadence", "Cadences", "Stopwatch"]


class Alarm:
    """Alarm that rings after `seconds` of wall time. Only rank 0's clock counts; all ranks receive its result."""

    def __init__(self, name: str, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.seconds, self._clock = name, seconds, clock
        self.reset()

    def reset(self) -> None:
        """Restarts the count."""
        self._since = self._clock()

    def rings(self) -> bool:
        """True once `seconds` have passed since the last reset."""
        return self._clock() - self._since >= self.seconds


class Cadence:
    """Interval in steps or in wall time; decides at which steps an action is due."""

    def __init__(self, key: str, every: Duration, steps: Mapping[str, int]) -> None:
        """Reads the interval `every` of the recipe's `key`; unless it is a wall time, `steps[key]` has it in steps."""
        self.key = key
        self.alarm = Alarm(key, every.seconds) if every.is_time else None
        self._steps = 0 if every.is_time else steps[key]

    def due(self, step: int, rung: Collection[str]) -> bool:
        """True if the action is due at `step`; then resets its alarm. `rung`: the alarms that rang, by consensus."""
        if self.alarm is None:
            return step % self._steps == 0
        if self.key not in rung:
            return False
        self.alarm.reset()
        return True


class Cadences:
    """Cadences of a run: `log_every` in steps, `save`, and `evaluation`, which is None without an evaluation set."""

    def __init__(self, recipe: Recipe, plan: RunPlan, *, evaluates: bool) -> None:
        self.log_every = plan.every["track.every"]
        self.save = Cadence("checkpoint.every", recipe.checkpoint.every, plan.every)
        self.evaluation = Cadence("train.eval_every", recipe.train.eval_every, plan.every) if evaluates else None
        self.keys = [one.key for one in (self.save, self.evaluation) if one]
        self._length = recipe.train.length

    def alarms(self, passed: float) -> list[Alarm]:
        """Returns the alarms of a run that has trained for `passed` seconds."""
        found = [one.alarm for one in (self.save, self.evaluation) if one and one.alarm]
        return [*found, Alarm("end", self._length.seconds - passed)] if self._length.is_time else found

    def owes_evaluation(self, step: int, end: float) -> bool:
        """True if the evaluation of `step` was due when the run stopped there; `end` is the last step of the run."""
        if self.evaluation is None or step == 0:
            return False
        return step >= end or (not self.evaluation.alarm and self.evaluation.due(step, ()))


class Stopwatch:
    """Steps, samples and wall time since the last row.

    `pause` and `resume` exclude the time of evaluations and checkpoints.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begins a new window at zero."""
        self.steps = self.samples = 0
        self._began = self._clock()

    @property
    def seconds(self) -> float:
        """Returns the wall time of the window so far."""
        return self._clock() - self._began

    def pause(self) -> None:
        """Stops the clock."""
        self._paused = self._clock()

    def resume(self) -> None:
        """Continues the clock from its value at `pause`."""
        self._began += self._clock() - self._paused
