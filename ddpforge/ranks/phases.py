"""Marks where a rank stands, in words of memory that a process beside it reads, and adds up the time in each place."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

__all__ = [
    "END",
    "WORDS",
    "Place",
    "allow",
    "count_from",
    "enter_step",
    "follow",
    "here",
    "mark",
    "say_goodbye",
    "share",
]
__all__ += ["spent"]
__all__ += ["BACKWARD", "CALLBACKS", "DATA", "EVAL", "FORWARD", "NAMES", "REDUCE", "SAVE", "START", "STEP"]

NAMES = ("start", "data", "forward", "backward", "optimizer", "reduce", "callbacks", "eval", "save", "end")
START, DATA, FORWARD, BACKWARD, STEP, REDUCE, CALLBACKS, EVAL, SAVE, END = range(len(NAMES))
# Of 8 bytes each: marks so far and the phase, the step, the attempt's first step, whether it said goodbye, and the
# milliseconds that it may stand in one place, where it knows them already.
WORDS = 5

_words: memoryview[int] = memoryview(bytearray(8 * WORDS)).cast("q")
_count = itertools.count(16, 16).__next__
_phase, _since = START, perf_counter()
_seconds = [0.0] * len(NAMES)
_follower: Callable[[int], None] | None = None


class Place(NamedTuple):
    """A rank's place; `marks` grows with every mark, and all ranks make the same marks in the same order."""

    phase: int
    step: int
    marks: int
    first: int  # the step with which the attempt begins; 0 before that is known
    left: bool  # it has told how it ended, and needs nobody to speak for it
    stall: float = 0.0  # seconds that it may stand in one place; 0 before that is known

    @classmethod
    def of(cls, words: memoryview[int]) -> Place:
        """The place that is written down in `words`."""
        return cls(words[0] & 15, words[1], words[0] >> 4, words[2], bool(words[3]), words[4] / 1000)


def mark(phase: int) -> None:
    """Notes that this rank enters a phase; costs less than half a microsecond: it is called several times a step."""
    global _phase, _since
    now = perf_counter()
    _seconds[_phase] += now - _since
    _phase, _since = phase, now
    _words[0] = _count() | phase
    if _follower is not None:
        _follower(phase)


def spent() -> tuple[float, ...]:
    """The seconds of wall time so far in each phase, in the order of NAMES; of the host, which may wait for a GPU."""
    now = perf_counter()
    return tuple(x + (now - _since if phase == _phase else 0.0) for phase, x in enumerate(_seconds))


def follow(follower: Callable[[int], None] | None) -> None:
    """Tells `follower` of every further mark, or nobody."""
    global _follower
    _follower = follower


def count_from(marks: int) -> None:
    """Counts further marks from `marks` on: called on all ranks alike, where they may have made different numbers."""
    global _count
    _count = itertools.count(16 * (marks + 1), 16).__next__
    mark(_words[0] & 15)


def enter_step(step: int) -> None:
    """Notes the step that the next marks belong to."""
    _words[1] = step
    _words[2] = _words[2] or step


def say_goodbye() -> None:
    """Notes that this rank has told how it ended."""
    _words[3] = 1


def allow(stall: float) -> None:
    """Notes the seconds for which this rank may stand in one place, which its recipe says."""
    _words[4] = int(1000 * min(stall, 1e12))


def here() -> Place:
    """The place of this rank."""
    return Place.of(_words)


def share(words: memoryview[int]) -> None:
    """Marks go into `words` from now on, and are counted from the beginning: an attempt starts."""
    global _words, _count
    words[0], words[1], words[2], words[3], words[4] = START, 0, 0, 0, 0
    _words, _count = words, itertools.count(16, 16).__next__
