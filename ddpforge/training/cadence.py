"""Tells when something is due, and measures how fast training goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping

from ddpforge.interfaces.durations import Duration

__all__ = ["Alarm", "Cadence", "Stopwatch"]


class Alarm:
    """Rings every `seconds` of wall time. Only rank 0's clock counts; the ranks agree on what it says."""

    def __init__(self, name: str, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.seconds, self._clock = name, seconds, clock
        self.reset()

    def reset(self) -> None:
        """Starts counting afresh."""
        self._since = self._clock()

    def rings(self) -> bool:
        """True once the time is up, until the next reset."""
        return self._clock() - self._since >= self.seconds


class Cadence:
    """Every so many steps, or every so often: says at which steps something is due."""

    def __init__(self, key: str, every: Duration, steps: Mapping[str, int]) -> None:
        """`every` is the value of the recipe's `key`; where it is no wall time, `steps` has it in steps, by key."""
        self.key = key
        self.alarm = Alarm(key, every.seconds) if every.is_time else None
        self._steps = 0 if every.is_time else steps[key]

    def due(self, step: int, rung: Collection[str]) -> bool:
        """`rung` are the alarms that all ranks agreed have rung."""
        if self.alarm is None:
            return step % self._steps == 0
        if self.key not in rung:
            return False
        self.alarm.reset()
        return True


class Stopwatch:
    """The steps since the last row: how many, how many samples, and how long they took.

    Time spent on evaluation and checkpoints is taken out with `pause` and `resume`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Begins a new window."""
        self.steps = self.samples = 0
        self._began = self._clock()

    def add(self, samples: int) -> None:
        """One more step, of `samples` samples over all ranks."""
        self.steps += 1
        self.samples += samples

    @property
    def seconds(self) -> float:
        """Wall time of the window so far."""
        return self._clock() - self._began

    def pause(self) -> None:
        """Stops the clock."""
        self._paused = self._clock()

    def resume(self) -> None:
        """Starts it again where it stood."""
        self._began += self._clock() - self._paused
