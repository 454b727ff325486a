"""The ranks that write one checkpoint: each does its part, and all of them learn whether all of them could."""

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Generic, TypeVar, cast

import torch
import torch.distributed as dist

from ddpforge.checkpoint import files
from ddpforge.errors import CheckpointError, ForgeError, StrategyError
from ddpforge.interfaces import World

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
X = TypeVar("X")
_Report = tuple[str, tuple[str, ...]]  # message and hints
_Reports = dict[int, _Report]


class OutOfTouch(Exception):
    """A collective operation failed: another rank is gone, or too late."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """How a rank reaches the others.

    `broadcast` gives rank 0's value to every rank. `gather` gives rank 0 a list of every rank's values, and the others
    None. Both are called on every rank, in the same order, with small picklable values; when a rank is gone, they must
    raise, if need be after a time limit. Ranks that write tell each other so every `look` seconds; one that has written
    nothing for `patience` seconds is given up.
    """

    rank: int
    size: int
    broadcast: Callable[[Any], Any]
    gather: Callable[[Any], list[Any] | None]

    patience: float = math.inf
    look: float = 1.0

    @classmethod
    def alone(cls) -> "Peers":
        """A rank without others: no communication."""
        return cls(rank=0, size=1, broadcast=lambda value: value, gather=lambda value: [value])

    @classmethod
    def of(cls, world: World, timeout: timedelta) -> "Peers":
        """All ranks of a world, over a gloo group of their own, so that a thread can use it while training goes on.

        Called on every rank. `timeout` is how long one rank waits for a word of another, however long that one takes to
        write, and for how long a disk may take nothing. Raises StrategyError where torch.distributed does not connect
        these ranks.
        """
        if world.size == 1:
            return cls.alone()
        _check_connected(world)
        group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout))  # every rank is a member

        def broadcast(value: Any) -> Any:
            values = [value]
            dist.broadcast_object_list(values, src=0, group=group, device=torch.device("cpu"))
            return values[0]

        def gather(value: Any) -> list[Any] | None:
            values: list[Any] | None = [None] * world.size if world.rank == 0 else None
            dist.gather_object(value, values, dst=0, group=group)
            return values

        patience = timeout.total_seconds()
        return cls(rank=world.rank, size=world.size, broadcast=broadcast, gather=gather, patience=patience)

    def everyone(self, value: T) -> list[T]:
        """The `value`s of all ranks, on every rank."""
        return cast(list[T], self.broadcast(self.gather(value)))

    def together(self, action: Callable[[], T], then: Callable[[], R]) -> tuple[T, R]:
        """Runs `action` on every rank, `then` on rank 0; returns what the first gave here, and the second there.

        When either fails on any rank, or writes nothing for `patience` seconds, every rank raises CheckpointError with
        the rank and the reason; a defect's traceback is in the log of that rank. Raises OutOfTouch when the ranks could
        not tell each other.
        """
        mine = self._begin(action)
        last: _Work[R] | None = None
        while True:
            mine.wait(self.look)
            words = self._touch(self.gather, mine.word(), mine.failure)
            if words is not None and all(word.done and word.report is None for word in words):
                last = last or self._begin(then)
                last.wait(self.look)
                words = [last.word(), *words[1:]]
            verdict = self._touch(self.broadcast, _verdict(words or (), last, self.patience), mine.failure)
            if verdict is not None:
                break

        theirs, reports = verdict
        if reports:
            raise _combined(reports) from mine.failure or (None if last is None else last.failure)
        return cast(T, mine.result), cast(R, theirs)

    def _begin(self, action: Callable[[], X]) -> "_Work[X]":
        return _Work(action, name=f"checkpoint work of rank-{self.rank}", apart=self.size > 1)

    def _touch(self, collective: Callable[[Any], Any], value: object, failure: Exception | None) -> Any:
        try:
            return collective(value)
        except Exception as error:
            if failure is not None:
                raise _combined({self.rank: _report(failure)}) from failure
            raise OutOfTouch(str(error)) from error


@dataclass(frozen=True)
class _Word:
    """How far a rank is: done, with a report of what went wrong; or for how many seconds it has written nothing."""

    done: bool
    report: _Report | None
    idle: float


class _Work(Generic[X]):
    """Something that a rank does, in a thread of its own where `apart`: the disk may never answer."""

    def __init__(self, action: Callable[[], X], *, name: str, apart: bool) -> None:
        self.result: X | None = None
        self.failure: Exception | None = None
        self._action = action
        self._fatal: BaseException | None = None
        self._done = threading.Event()
        self._progress, self._since = files.progress(), time.monotonic()
        self._gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        if apart:
            threading.Thread(target=self._run, name=name, daemon=True).start()
        else:
            self._run()

    def wait(self, seconds: float) -> None:
        """Waits until it is done, but no longer than this."""
        self._done.wait(seconds)
        if self._fatal is not None:
            raise self._fatal

    def word(self) -> _Word:
        """What is to be told of it."""
        if self._done.is_set():
            return _Word(True, None if self.failure is None else _report(self.failure), 0.0)
        if (progress := files.progress()) != self._progress:
            self._progress, self._since = progress, time.monotonic()
        return _Word(False, None, time.monotonic() - self._since)

    def _run(self) -> None:
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)  # a thread begins with the first
            self.result, self.failure = _attempt(self._action)
        except BaseException as error:
            self._fatal = error
        self._done.set()


def _verdict(words: Sequence[_Word], last: "_Work[R] | None", patience: float) -> tuple[R | None, _Reports] | None:
    """On rank 0: what came of it, once that is known; the ranks' words come by rank."""
    reports = {rank: word.report for rank, word in enumerate(words) if word.report is not None}
    late = {rank: word for rank, word in enumerate(words) if not word.done}
    stuck: _Reports = {rank: _stuck(word) for rank, word in late.items() if word.idle > patience}
    if (late and not stuck) or not words:
        return None
    return last.result if last else None, {**reports, **stuck}


def _stuck(word: _Word) -> _Report:
    hints = ("is the disk alive? train.timeout says how long one may write nothing",)
    return f"nothing could be written for {word.idle:.0f} s", hints


def _check_connected(world: World) -> None:
    problem = None
    if not dist.is_available() or not dist.is_gloo_available():
        problem = "this build of torch has no torch.distributed with gloo"
    elif not dist.is_initialized():
        problem = "torch.distributed is not initialised"
    elif (found := (dist.get_rank(), dist.get_world_size())) != (world.rank, world.size):
        problem = f"torch.distributed has this as rank {found[0]} of {found[1]}"
    if problem:
        raise StrategyError(
            f"checkpoints of {world.size} ranks cannot be written: {problem}, and the strategy says that this is rank "
            f"{world.rank} of {world.size}",
            hints=["a strategy's `setup` must initialise torch.distributed with all ranks"],
        )


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
        if not isinstance(error, ForgeError):
            log.error("a defect while a checkpoint was written", exc_info=error)
        return None, error


def _report(failure: Exception) -> _Report:
    if isinstance(failure, ForgeError):
        return failure.message, failure.hints
    return f"{type(failure).__name__}: {failure}", ()


def _combined(reports: Mapping[int, _Report]) -> CheckpointError:
    """One error for what went wrong on several ranks; what went wrong in the same way is said once."""
    ranks: dict[str, list[str]] = {}
    for rank, (message, _) in reports.items():
        ranks.setdefault(message, []).append(str(rank))
    texts = [f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {message}" for message, who in ranks.items()]
    hints = {hint: None for _, hints in reports.values() for hint in hints}
    return CheckpointError("; ".join(texts), hints=list(hints))
