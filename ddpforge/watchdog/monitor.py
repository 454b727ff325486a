"""Decides when a rank has made no progress for too long, and what to do then."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from ddpforge.ranks.heartbeat import END, EVAL, NAMES, SAVE, START, Heartbeat, RankStatus
from ddpforge.watchdog.culprit import Culprit, find_culprit

__all__ = ["Limits", "Monitor", "MonitoredProcess", "Reporter"]

_GRACE = 10.0  # seconds
_MULTIPLES = {START: 6, EVAL: 3, SAVE: 6, END: 6}


class Limits(NamedTuple):
    """Maximum seconds between two heartbeats of a rank."""

    hang_timeout: float
    compiles: bool = False
    grace: float = _GRACE  # seconds for a rank to end by itself after another rank has failed

    def of(self, phase: int, *, first: bool) -> float:
        """Returns the limit in seconds in a phase; `first`: in the first step of an attempt, which may compile."""
        return self.hang_timeout * max(_MULTIPLES.get(phase, 1), (6 if self.compiles else 3) if first else 1)

    @property
    def poll_interval(self) -> float:
        """Returns the seconds between two looks."""
        return min(1.0, self.hang_timeout / 8)


class MonitoredProcess(Protocol):
    """Process of a rank, see `process.Process`."""

    pid: int

    def ended(self, wait: float) -> bool:
        """True if the process has ended; waits for that at most `wait` seconds."""

    def place(self) -> Heartbeat:
        """Returns its last heartbeat."""

    def frozen(self) -> bool:
        """True while the process is stopped."""

    def death(self) -> str:
        """Returns how the process ended."""

    def stacks(self) -> str:
        """Returns the stacks of all its threads."""

    def last_stacks(self) -> str:
        """Returns the stacks that it wrote when it crashed."""

    def line(self, stacks: str) -> str:
        """Returns the current line of its main thread."""

    def end(self) -> None:
        """Kills the process."""


class StatusBoardLike(Protocol):
    """Board on which watchdogs publish status rows, see `status_board.StatusBoard`."""

    @property
    def cut_off(self) -> float:
        """Returns the seconds since the store was last reached."""

    def publish(self, row: RankStatus) -> None:
        """Publishes a row."""

    def call(self) -> None:
        """Calls all watchdogs to publish the status of their ranks."""

    def called(self) -> bool:
        """True if any watchdog or rank has called for status."""

    def rows(self) -> dict[int, RankStatus]:
        """Returns the newest row of every rank."""


class Reporter(Protocol):
    """Reporter of failures, see `reporter.RunFolderReporter`."""

    def any_failed(self) -> bool:
        """True if the first failure is known."""

    def keep_stacks(self, stacks: str) -> None:
        """Writes this rank's stacks to a file."""

    def report_hang(self, found: Culprit, rows: Mapping[int, RankStatus]) -> None:
        """Reports a failure, unless another one was reported before."""

    def report_end(self, why: str) -> None:
        """Records that this rank is killed because another one failed."""


class Monitor:
    """Watches one rank. The caller repeats `poll` until it returns True."""

    def __init__(
        self,
        rank: int,
        size: int,
        process: MonitoredProcess,
        board: StatusBoardLike,
        reporter: Reporter,
        limits: Limits,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rank, self._size, self._process, self._board, self._reporter = rank, size, process, board, reporter
        self._limits, self._clock, self._sleep = limits, clock, sleep
        self._host = os.uname().nodename
        self._place, self._since, self._looked = process.place(), clock(), clock()
        self._failed: float | None = None  # time at which the failure of a rank became known

    def poll(self) -> bool:
        """Checks the rank once. True if there is nothing more to watch."""
        place, now = self._process.place(), self._clock()
        if place[:3] != self._place[:3]:
            self._since = now
        elif (gap := now - self._looked) > 3 * self._limits.poll_interval + 2:
            self._since += gap  # this process did not run either: the whole job was suspended
        self._place, self._looked = place, now
        row = self._row()
        self._board.publish(row)
        if self._board.called() or (self._is_late() and not self._others_get_on(row) and self._stands_still(place)):
            self._answer()
            return True
        return self._outlives_another()

    def died(self) -> None:
        """Reports the end of the rank's process if the rank could not report it; called after that end."""
        if not self._process.place().left and not self._reporter.any_failed():
            stacks = self._process.last_stacks()
            self._reporter.keep_stacks(stacks)
            row = self._row(at=self._process.line(stacks) if stacks else "")
            at = f" at {row.at}" if row.at else ""
            sentence = f"{self._process.death()} in {row.location()}{at} (process {row.pid} on {row.host})"
            self._reporter.report_hang(Culprit([self._rank], sentence), {self._rank: row})

    # -- one look
    def _row(self, *, at: str = "", frozen: bool | None = None, answers: bool = False) -> RankStatus:
        place = self._process.place()
        return RankStatus(
            rank=self._rank,
            host=self._host,
            pid=self._process.pid,
            phase=NAMES[place.phase],
            step=place.step,
            beats=place.beats,
            seconds=round(self._clock() - self._since, 2),
            frozen=self._process.frozen() if frozen is None else frozen,
            at=at,
            cut_off=round(self._board.cut_off, 2),
            answers=answers,
            left=place.left,
            time=time.time(),
            on_device=place.on_device,
        )

    def _is_late(self) -> bool:
        first = self._place.step <= max(self._place.first, 1)
        limits = self._limits._replace(hang_timeout=self._place.hang_timeout or self._limits.hang_timeout)
        return self._clock() - self._since > limits.of(self._place.phase, first=first)

    def _others_get_on(self, mine: RankStatus) -> bool:
        """True while this rank waits for a rank that is behind and within its time limit."""
        rows = {**self._board.rows(), self._rank: mine}
        least = min((row.step, row.beats) for row in rows.values())
        behind = [row for row in rows.values() if (row.step, row.beats) == least]
        if mine in behind:
            return False
        first = self._place.first
        limits = {row: self._limits.of(NAMES.index(row.phase), first=row.step <= max(first, 1)) for row in behind}
        return any(row.seconds < limit for row, limit in limits.items())

    def _stands_still(self, place: Heartbeat) -> bool:
        """True if the rank made no heartbeat while its stacks were written: then the others must be called."""
        if not place.left:
            self._process.stacks()
        now = self._process.place()
        if now[:3] == place[:3]:
            return True
        self._place, self._since = now, self._clock()
        self._board.publish(self._row())
        return False

    def _outlives_another(self) -> bool:
        """Kills the rank if it has not ended in time after the failure of another rank. True if it was killed."""
        if self._failed is None and self._reporter.any_failed():
            self._failed = self._clock()
        if self._failed is None or self._process.place().left:
            return False
        frozen = self._process.frozen()
        if not frozen and self._clock() - self._failed < self._limits.grace:
            return False
        stacks = self._process.stacks()
        self._reporter.keep_stacks(stacks)
        self._reporter.report_end(str(self._row(at=self._process.line(stacks), frozen=frozen)))
        self._process.end()
        return True

    # -- all watchdogs are called
    def _answer(self) -> None:
        """Publishes this rank's status, reports the rank at fault if no other watchdog has, and kills this rank."""
        self._board.call()
        left, frozen = self._process.place().left, self._process.frozen()
        mine = self._row(frozen=frozen, answers=True)
        stacks = "" if left else self._process.stacks()
        self._reporter.keep_stacks(stacks)
        if self._process.place()[:3] == (NAMES.index(mine.phase), mine.step, mine.beats):
            mine = mine._replace(at=self._process.line(stacks))  # after a new heartbeat the line would not fit the row
        self._board.publish(mine)
        rows = self._gather(mine)
        found = find_culprit(rows, self._size)
        if self._board.cut_off:
            self._sleep(3.0)  # watchdogs that still reach the store have more rows: they report first
        self._reporter.report_hang(found, rows)
        if left:
            return
        # The rank at fault is killed last, so that no rank reports the end of another rank as the cause.
        self._sleep(0.5 if self._rank in found.ranks else 0.0)
        self._reporter.report_end(str(mine))
        self._process.end()

    def _gather(self, mine: RankStatus) -> dict[int, RankStatus]:
        """Waits some seconds for the answers of all ranks; returns the newest rows."""
        deadline = self._clock() + 3 * self._limits.poll_interval + 3.0
        while True:
            rows = {**self._board.rows(), self._rank: mine}
            if sum(row.answers for row in rows.values()) == self._size or self._clock() > deadline:
                return rows
            self._sleep(0.2)
