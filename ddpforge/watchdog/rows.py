"""A line about a rank, as the processes beside the ranks show it to each other."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ddpforge.ranks import phases

if TYPE_CHECKING:
    from ddpforge.ranks.failures import Report

__all__ = ["Row", "described", "here"]


class Row(NamedTuple):
    """The place of a rank, and for how many seconds it has been there.

    `at` is the line of Python where its main thread stands; `cut_off` is for how many seconds the process beside it
    has not reached the launcher's store; `answers` says that the row was written because everybody was called; `left`
    that the rank has lost touch with the others, and said so; `time` is when, since 1970.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    marks: int
    seconds: float
    frozen: bool = False
    at: str = ""
    cut_off: float = 0.0
    answers: bool = False
    left: bool = False
    time: float = 0.0

    @classmethod
    def read(cls, found: Any) -> Row:
        """The row in what JSON has made of it; raises TypeError, or ValueError, for anything else."""
        row = cls(**found)
        if not all(
            isinstance(number, int | float) for number in (row.rank, row.step, row.marks, row.seconds, row.time)
        ):
            raise ValueError("not a row")
        return row

    def as_of(self, time: float) -> Row:
        """The same at a later time, as far as is known."""
        return self._replace(seconds=self.seconds + max(0.0, time - self.time), time=max(time, self.time))

    def place(self) -> str:
        """The place in words."""
        return f"{self.phase} of step {self.step}" if self.step else self.phase

    def __str__(self) -> str:
        at = f", at {self.at}" if self.at else ""
        frozen = ", frozen" if self.frozen else ""
        return f"rank {self.rank} on {self.host} (pid {self.pid}): {self.place()} for {self.seconds:.0f} s{frozen}{at}"


def here(rank: int) -> Row:
    """The row of this process, which is a rank that still speaks."""
    place = phases.here()
    where = (rank, os.uname().nodename, os.getpid(), phases.NAMES[place.phase], place.step, place.marks, 0.0)
    return Row(*where, left=True, time=time.time())


def described(cause: Report, rows: Sequence[Row], waited_for: Sequence[int] = ()) -> dict[str, Any]:
    """The contents of `failure.json`."""
    mine = next((row for row in rows if row.rank == cause.rank), None)
    return {
        **cause.facts(),
        "told_by": "rank" if cause.told else "watch",
        "phase": mine and mine.phase,
        "step": mine and mine.step,
        "seconds": mine and mine.seconds,
        "waited_for": [*(waited_for or [cause.rank])],
        "ranks": [row._asdict() for row in rows],
    }
