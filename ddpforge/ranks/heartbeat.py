"""Heartbeat of a rank: its current phase and step, in memory that its watchdog reads, and the time in each phase."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

__all__ = [
    "END",
    "WORDS",
    "Heartbeat",
    "RankStatus",
    "beat",
    "current",
    "enter_step",
    "finish_forward",
    "finish_on_device",
    "follow",
    "follow_forward",
    "here",
    "mark_exited",
    "reset_beats",
    "seconds_by_phase",
    "set_hang_timeout",
    "use_shared_memory",
]
__all__ += ["BACKWARD", "CALLBACKS", "DATA", "EVAL", "FORWARD", "NAMES", "REDUCE", "SAVE", "START", "STEP"]

NAMES = ("start", "data", "forward", "backward", "optimizer", "reduce", "callbacks", "eval", "save", "end")
START, DATA, FORWARD, BACKWARD, STEP, REDUCE, CALLBACKS, EVAL, SAVE, END = range(len(NAMES))
# Words of 8 bytes: number of marks and the phase; the step; the attempt's first step; 1 if the rank has reported its
# end; the maximum milliseconds without progress, or 0 if not known yet; the newest step whose forward passes the device
# has finished, or 0 if not known.
WORDS = 6

_words: memoryview[int] = memoryview(bytearray(8 * WORDS)).cast("q")
_count = itertools.count(16, 16).__next__
_phase, _since = START, perf_counter()
_seconds = [0.0] * len(NAMES)
_follower: Callable[[int], None] | None = None
_follower_of_forward: Callable[[int], None] | None = None


class Heartbeat(NamedTuple):
    """Progress of a rank. `beats` counts its heartbeats; all ranks make the same marks in the same order."""

    phase: int
    step: int
    beats: int
    first: int  # the first step of the attempt; 0 if not known yet
    left: bool  # the rank has reported its end: the watchdog need not do it
    hang_timeout: float = 0.0  # maximum seconds without progress; 0 if not known yet
    on_device: int = 0  # the newest step whose forward passes the device has finished; 0 if not known

    @classmethod
    def of(cls, words: memoryview[int]) -> Heartbeat:
        """Decodes the place from `words`."""
        return cls(words[0] & 15, words[1], words[0] >> 4, words[2], bool(words[3]), words[4] / 1000, words[5])


class RankStatus(NamedTuple):
    """Status of a rank: its phase and step, and the seconds since its last heartbeat.

    beats: the number of heartbeats so far.
    at: the current Python line of its main thread.
    cut_off: seconds for which its watchdog has not reached the launcher's store.
    answers: the row was written after a call for status.
    left: the rank has reported its own end, and needs no watchdog.
    time: when the row was written, in seconds since 1970.
    on_device: the newest step whose forward passes its device has finished; 0 if not known.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    beats: int
    seconds: float
    frozen: bool = False
    at: str = ""
    cut_off: float = 0.0
    answers: bool = False
    left: bool = False
    time: float = 0.0
    on_device: int = 0

    @classmethod
    def read(cls, found: Any) -> RankStatus:
        """Returns the row in an object from JSON. Raises TypeError or ValueError if it is not a row."""
        row = cls(**found)
        if not all(
            isinstance(number, int | float)
            for number in (row.rank, row.step, row.beats, row.seconds, row.time, row.on_device)
        ):
            raise ValueError("not a row")
        return row

    def as_of(self, time: float) -> RankStatus:
        """Returns the row as it would be at a later `time` without a new heartbeat."""
        return self._replace(seconds=self.seconds + max(0.0, time - self.time), time=max(time, self.time))

    def location(self) -> str:
        """Returns phase and step in words, as "forward of step 3"."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def __str__(self) -> str:
        at = f", at {self.at}" if self.at else ""
        frozen = ", frozen" if self.frozen else ""
        device = f", its device has finished forward of step {self.on_device}" if self.on_device else ""
        place = f"rank {self.rank} on {self.host} (pid {self.pid}): {self.location()}"
        return f"{place} for {self.seconds:.0f} s{frozen}{at}{device}"


def beat(phase: int) -> None:
    """Records that this rank enters a phase: a heartbeat."""
    # Called several times a step; takes less than half a microsecond.
    global _phase, _since
    now = perf_counter()
    _seconds[_phase] += now - _since
    _phase, _since = phase, now
    _words[0] = _count() | phase
    if _follower is not None:
        _follower(phase)


def seconds_by_phase() -> tuple[float, ...]:
    """Returns the seconds of wall time so far in each phase, in the order of NAMES.

    This is time of the host, which includes waiting for a GPU.
    """
    now = perf_counter()
    return tuple(x + (now - _since if phase == _phase else 0.0) for phase, x in enumerate(_seconds))


def follow(follower: Callable[[int], None] | None) -> None:
    """Calls `follower` with the phase at every further mark; None ends that."""
    global _follower
    _follower = follower


def follow_forward(follower: Callable[[int], None] | None) -> None:
    """Calls `follower` with the step at every further `finish_forward`; None ends that."""
    global _follower_of_forward
    _follower_of_forward = follower


def finish_forward() -> None:
    """Records that the forward passes of the current step are queued on the device."""
    if _follower_of_forward is not None:
        _follower_of_forward(_words[1])


def finish_on_device(step: int) -> None:
    """Records that the device has finished the forward passes of `step`."""
    _words[5] = step


def reset_beats(marks: int) -> None:
    """Sets the number of marks. Called on all ranks with the same number, after parts in which their numbers differ."""
    global _count
    _count = itertools.count(16 * (marks + 1), 16).__next__
    beat(_words[0] & 15)


def enter_step(step: int) -> None:
    """Records the step that the next marks belong to."""
    _words[1] = step
    _words[2] = _words[2] or step


def mark_exited() -> None:
    """Records that this rank has reported its end."""
    _words[3] = 1


def set_hang_timeout(seconds: float) -> None:
    """Records the recipe's maximum seconds without progress of this rank."""
    _words[4] = int(1000 * min(seconds, 1e12))


def current() -> Heartbeat:
    """Returns the place of this rank."""
    return Heartbeat.of(_words)


def use_shared_memory(words: memoryview[int]) -> None:
    """Starts an attempt: clears `words`, writes further marks to it, and counts them from the beginning."""
    global _words, _count
    words[0], words[1], words[2], words[3], words[4], words[5] = START, 0, 0, 0, 0, 0
    _words, _count = words, itertools.count(16, 16).__next__


def here(rank: int) -> RankStatus:
    """Returns the row of this process, a rank that reports its own failure."""
    place = current()
    where = (rank, os.uname().nodename, os.getpid(), NAMES[place.phase], place.step, place.beats, 0.0)
    return RankStatus(*where, left=True, time=time.time())
