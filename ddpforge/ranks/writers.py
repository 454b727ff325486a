"""Joint work of ranks: writing a checkpoint that succeeds on all ranks or on none, and actions of rank 0 for all."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

from ddpforge import disk
from ddpforge.errors import CheckpointError, ExitCode, ForgeError, PeerFailed
from ddpforge.interfaces import Ranks, active_kind
from ddpforge.ranks.collectives import ProcessGroup, SingleRank

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
X = TypeVar("X")
_Report = tuple[str, tuple[str, ...]]  # message and hints
_Reports = dict[int, _Report]


class PeerUnreachable(Exception):
    """Failure of a collective operation: another rank has ended or is too late."""


@dataclass(frozen=True, kw_only=True)
class WriterGroup:
    """Connection of a writer thread to those of the other ranks, over `ranks`, which no other thread uses.

    Ranks report their progress to each other every `look` seconds. Writing fails if a rank has written nothing for
    `patience` seconds.
    """

    ranks: Ranks
    patience: float = math.inf
    look: float = 1.0

    @classmethod
    def alone(cls) -> "WriterGroup":
        """Builds the peers of a single process, without communication."""
        return cls(ranks=SingleRank())

    @classmethod
    def of(cls, ranks: Ranks, timeout: timedelta) -> "WriterGroup":
        """Builds peers for the same ranks on a separate process group. Every rank must call it.

        `timeout` limits the time of one collective operation, and the time without progress of a disk. It does not
        limit the time of the whole write.
        """
        return cls(ranks=ProcessGroup.of_writers(ranks, timeout), patience=timeout.total_seconds())

    @property
    def rank(self) -> int:
        """Returns the number of this rank."""
        return self.ranks.rank

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.ranks.size

    def run_all_or_none(self, action: Callable[[], T], then: Callable[[], R]) -> tuple[T, R]:
        """Runs `action` on every rank and `then` on rank 0; returns this rank's result of `action` and that of `then`.

        If either fails on any rank, or writes nothing for `patience` seconds, every rank raises CheckpointError with
        the rank and the reason. The traceback of an unexpected exception is in the log of that rank. Raises
        PeerUnreachable if the ranks cannot communicate.
        """
        mine = self._begin(action)
        last: _Work[R] | None = None
        while True:
            mine.wait(self.look)
            words = self._touch(self.ranks.all_gather_object, mine.word(), mine.failure)
            if self.rank == 0 and all(word.done and word.report is None for word in words):
                last = last or self._begin(then)
                last.wait(self.look)
                words = [last.word(), *words[1:]]
            verdict = self._touch(self.ranks.broadcast, self._verdict(words, last), mine.failure)
            if verdict is not None:
                break

        theirs, reports = verdict
        if reports:
            raise _combined(reports) from mine.failure or (None if last is None else last.failure)
        return cast(T, mine.result), cast(R, theirs)

    def _verdict(self, words: "Sequence[_Word]", last: "_Work[R] | None") -> tuple[R | None, _Reports] | None:
        """Returns the result of `then` and the failures by rank, on rank 0 if they are known; else None.

        `words` has the progress of each rank, by rank.
        """
        reports = {rank: word.report for rank, word in enumerate(words) if word.report is not None}
        late = {rank: word for rank, word in enumerate(words) if not word.done}
        hints = ("check the disk; train.collective_timeout is the maximum time without a write",)
        stuck: _Reports = {
            rank: (f"nothing could be written for {word.idle:.0f} s", hints)
            for rank, word in late.items()
            if word.idle > self.patience
        }
        if self.rank != 0 or (late and not stuck):
            return None
        return last.result if last else None, {**reports, **stuck}

    def _begin(self, action: Callable[[], X]) -> "_Work[X]":
        return _Work(action, name=f"checkpoint work of rank-{self.rank}", apart=self.size > 1)

    def _touch(self, collective: Callable[[Any], Any], value: object, failure: Exception | None) -> Any:
        try:
            return collective(value)
        except Exception as error:
            if failure is not None:
                raise _combined({self.rank: _report(failure)}) from failure
            raise PeerUnreachable(str(error)) from error


@dataclass(frozen=True)
class _Word:
    """Progress of a rank: `done`, with the `report` of a failure; or `idle` seconds since its last write."""

    done: bool
    report: _Report | None
    idle: float


class _Work(Generic[X]):
    """Action of a rank; with `apart` in a separate thread, because the disk may never answer."""

    def __init__(self, action: Callable[[], X], *, name: str, apart: bool) -> None:
        self.result: X | None = None
        self.failure: Exception | None = None
        self._action = action
        self._fatal: BaseException | None = None
        self._done = threading.Event()
        self._progress, self._since = disk.progress(), time.monotonic()
        self._kind = active_kind()
        self._device = self._kind.current() if self._kind else None
        if apart:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        else:
            self._run()

    def wait(self, seconds: float) -> None:
        """Waits until the action has ended, but at most `seconds`."""
        self._done.wait(seconds)
        if self._fatal is not None:
            raise self._fatal

    def word(self) -> _Word:
        """Returns the progress of this rank."""
        if self._done.is_set():
            return _Word(True, None if self.failure is None else _report(self.failure), 0.0)
        if (progress := disk.progress()) != self._progress:
            self._progress, self._since = progress, time.monotonic()
        return _Word(False, None, time.monotonic() - self._since)

    def _run(self) -> None:
        try:
            if self._kind:
                self._kind.make_current(self._device)  # a new thread has device 0
            self.result, self.failure = _attempt(self._action)
        except BaseException as error:
            self._fatal = error
        self._done.set()


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        if not isinstance(error, ForgeError):
            log.error("unexpected exception while a checkpoint was written", exc_info=error)
        return None, error


def _report(failure: Exception) -> _Report:
    if isinstance(failure, ForgeError):
        return failure.message, failure.hints
    return f"{type(failure).__name__}: {failure}", ()


def _combined(reports: Mapping[int, _Report]) -> CheckpointError:
    """Returns one error for the failures of several ranks; equal messages are merged."""
    ranks: dict[str, list[str]] = {}
    for rank, (message, _) in reports.items():
        ranks.setdefault(message, []).append(str(rank))
    texts = [f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {message}" for message, who in ranks.items()]
    hints = {hint: None for _, hints in reports.values() for hint in hints}
    return CheckpointError("; ".join(texts), hints=list(hints))


def on_rank_zero(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0; returns its result on every rank. Collective.

    If `action` raises, rank 0 raises that exception, and the other ranks raise PeerFailed with its message.
    """
    result: T | None = None
    refusal: tuple[ExitCode, str, Sequence[str]] | None = None
    failure: Exception | None = None
    if ranks.is_rank_zero:
        try:
            result = action()
        except Exception as error:
            failure = error
            if isinstance(error, ForgeError):
                refusal = error.exit_code, error.message, error.hints
            else:
                refusal = ExitCode.FAILED, f"rank 0 failed first: {type(error).__name__}: {error}", ()

    result, refusal = ranks.broadcast((result, refusal))
    if failure is not None:
        raise failure
    if refusal is not None:
        code, message, hints = refusal
        raise PeerFailed(code, message, hints=hints)
    return cast(T, result)
