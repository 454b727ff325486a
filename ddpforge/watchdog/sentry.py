"""Decides when a rank has stood too long in one place, and what is done about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from ddpforge.ranks.phases import END, EVAL, NAMES, SAVE, START, Place
from ddpforge.watchdog.blame import Blame, blame
from ddpforge.watchdog.board import Row

__all__ = ["Limits", "Sentry", "Teller", "Watched"]

_GRACE = 10.0  # seconds
_MULTIPLES = {START: 6, EVAL: 3, SAVE: 6, END: 6}


class Limits(NamedTuple):
    """The seconds for which a rank may stand in one place."""

    stall: float
    compiles: bool = False
    grace: float = _GRACE  # for a rank to notice by itself that another one has failed

    def of(self, phase: int, *, first: bool) -> float:
        """The limit in a phase, and in the first step of an attempt, which may have to compile."""
        return self.stall * max(_MULTIPLES.get(phase, 1), (6 if self.compiles else 3) if first else 1)

    @property
    def look(self) -> float:
        """Seconds between two looks."""
        return min(1.0, self.stall / 8)


class Watched(Protocol):
    """A rank's process, see `process.Process`."""

    pid: int

    def ended(self, wait: float) -> bool:
        """Waits for its end."""

    def place(self) -> Place:
        """The place where it stands."""

    def frozen(self) -> bool:
        """True while it is stopped."""

    def death(self) -> str:
        """The way it ended."""

    def stacks(self) -> str:
        """The stacks of all its threads."""

    def last_stacks(self) -> str:
        """The stacks that it wrote when it crashed."""

    def line(self, stacks: str) -> str:
        """The line on which its main thread stands."""

    def end(self) -> None:
        """Ends it."""


class Shown(Protocol):
    """A place where ranks' rows are shown, see `board.Board`."""

    @property
    def cut_off(self) -> float:
        """Seconds for which the store has been out of reach."""

    def show(self, row: Row) -> None:
        """Shows a row to the others."""

    def call(self) -> None:
        """Calls everybody to show where they stand."""

    def called(self) -> bool:
        """True when somebody has."""

    def rows(self) -> dict[int, Row]:
        """The newest row of every rank."""


class Teller(Protocol):
    """Writes down what is found in the run's folder, see `report.Told`."""

    def someone_failed(self) -> bool:
        """True when a rank is known that failed first."""

    def keep_stacks(self, stacks: str) -> None:
        """Writes this rank's stacks down."""

    def tell(self, found: Blame, rows: Mapping[int, Row]) -> None:
        """Tells of a failure, unless another one was told first."""

    def tell_end(self, why: str) -> None:
        """Says that this rank is ended for another's failure."""


class Sentry:
    """Watches one rank: `look` at every moment, until that says that nothing is left to be watched."""

    def __init__(
        self,
        rank: int,
        size: int,
        process: Watched,
        board: Shown,
        teller: Teller,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rank, self._size, self._process, self._board, self._teller = rank, size, process, board, teller
        self._limits, self._clock, self._sleep = limits, clock, sleep
        self._host = os.uname().nodename
        self._place, self._since, self._looked = process.place(), clock(), clock()
        self._failed: float | None = None  # since when it is known that a rank has

    def look(self) -> bool:
        """True when this was the last look."""
        place, now = self._process.place(), self._clock()
        if place[:3] != self._place[:3]:
            self._since = now
        elif (gap := now - self._looked) > 3 * self._limits.look + 2:
            self._since += gap  # nobody ran, this process neither: a job that was suspended
        self._place, self._looked = place, now
        row = self._row()
        self._board.show(row)
        if self._board.called() or (self._is_late() and not self._others_get_on(row) and self._stands_still(place)):
            self._answer()
            return True
        return self._outlives_another()

    def died(self) -> None:
        """Its process has ended; where it could not say why, that is said now."""
        if not self._process.place().left and not self._teller.someone_failed():
            stacks = self._process.last_stacks()
            self._teller.keep_stacks(stacks)
            row = self._row(at=self._process.line(stacks) if stacks else "")
            at = f" at {row.at}" if row.at else ""
            sentence = f"{self._process.death()} in {row.place()}{at} (process {row.pid} on {row.host})"
            self._teller.tell(Blame([self._rank], sentence), {self._rank: row})

    # -- one look
    def _row(self, *, at: str = "", frozen: bool | None = None, answers: bool = False) -> Row:
        place = self._process.place()
        return Row(
            rank=self._rank,
            host=self._host,
            pid=self._process.pid,
            phase=NAMES[place.phase],
            step=place.step,
            marks=place.marks,
            seconds=round(self._clock() - self._since, 2),
            frozen=self._process.frozen() if frozen is None else frozen,
            at=at,
            cut_off=round(self._board.cut_off, 2),
            answers=answers,
            left=place.left,
            time=time.time(),
        )

    def _is_late(self) -> bool:
        first = self._place.step <= max(self._place.first, 1)
        limits = self._limits._replace(stall=self._place.stall or self._limits.stall)
        return self._clock() - self._since > limits.of(self._place.phase, first=first)

    def _others_get_on(self, mine: Row) -> bool:
        """True while this rank waits for one that may still be where it is."""
        rows = {**self._board.rows(), self._rank: mine}
        least = min((row.step, row.marks) for row in rows.values())
        behind = [row for row in rows.values() if (row.step, row.marks) == least]
        if mine in behind:
            return False
        first = self._place.first
        limits = {row: self._limits.of(NAMES.index(row.phase), first=row.step <= max(first, 1)) for row in behind}
        return any(row.seconds < limit for row, limit in limits.items())

    def _stands_still(self, place: Place) -> bool:
        """True where this rank has not moved on while its stacks were written: others are not called in vain."""
        if not place.left:
            self._process.stacks()
        now = self._process.place()
        if now[:3] == place[:3]:
            return True
        self._place, self._since = now, self._clock()
        self._board.show(self._row())
        return False

    def _outlives_another(self) -> bool:
        """Ends the rank where it has not noticed, in time, that another one has failed."""
        if self._failed is None and self._teller.someone_failed():
            self._failed = self._clock()
        if self._failed is None or self._process.place().left:
            return False
        frozen = self._process.frozen()
        if not frozen and self._clock() - self._failed < self._limits.grace:
            return False
        stacks = self._process.stacks()
        self._teller.keep_stacks(stacks)
        self._teller.tell_end(str(self._row(at=self._process.line(stacks), frozen=frozen)))
        self._process.end()
        return True

    # -- everybody is called
    def _answer(self) -> None:
        """Calls everybody; says where this rank stands and, if nobody has, who the others wait for; ends the rank."""
        self._board.call()
        left, frozen = self._process.place().left, self._process.frozen()
        mine = self._row(frozen=frozen, answers=True)
        stacks = "" if left else self._process.stacks()
        self._teller.keep_stacks(stacks)
        if self._process.place()[:3] == (NAMES.index(mine.phase), mine.step, mine.marks):
            mine = mine._replace(at=self._process.line(stacks))  # else that would be the line of another moment
        self._board.show(mine)
        rows = self._gather(mine)
        found = blame(rows, self._size)
        if self._board.cut_off:
            self._sleep(3.0)  # those that still reach the store know better
        self._teller.tell(found, rows)
        if left:
            return
        self._sleep(0.5 if self._rank in found.ranks else 0.0)  # nobody may take the others' end for the cause
        self._teller.tell_end(str(mine))
        self._process.end()

    def _gather(self, mine: Row) -> dict[int, Row]:
        """Waits a moment for the answers of all ranks."""
        deadline = self._clock() + 3 * self._limits.look + 3.0
        while True:
            rows = {**self._board.rows(), self._rank: mine}
            if sum(row.answers for row in rows.values()) == self._size or self._clock() > deadline:
                return rows
            self._sleep(0.2)
