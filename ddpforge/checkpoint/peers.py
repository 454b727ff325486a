"""The ranks that write one checkpoint: each does its part, and all of them learn whether all of them could."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

from ddpforge.errors import CheckpointError, ForgeError, StrategyError
from ddpforge.interfaces import World

log = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
_Report = tuple[str, tuple[str, ...]]  # message and hints


class OutOfTouch(Exception):
    """A collective operation failed: another rank is gone, or too late."""


@dataclass(frozen=True, kw_only=True)
class Peers:
    """How a rank reaches the others.

    `broadcast` gives rank 0's value to every rank. `gather` gives rank 0 a list of every rank's values, and the others
    None. Both are called on every rank, in the same order, with small picklable values; when a rank is gone, they must
    raise, if need be after a time limit.
    """

    rank: int
    size: int
    broadcast: Callable[[Any], Any]
    gather: Callable[[Any], list[Any] | None]

    @classmethod
    def alone(cls) -> "Peers":
        """A rank without others: no communication."""
        return cls(rank=0, size=1, broadcast=lambda value: value, gather=lambda value: [value])

    @classmethod
    def of(cls, world: World, timeout: timedelta) -> "Peers":
        """All ranks of a world, over a gloo group of their own, so that a thread can use it while training goes on.

        Called on every rank. `timeout` is how long one rank waits for another: longer than it takes the slowest to
        write. Raises StrategyError where torch.distributed does not connect these ranks.
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

        return cls(rank=world.rank, size=world.size, broadcast=broadcast, gather=gather)

    def everyone(self, value: T) -> list[T]:
        """The `value`s of all ranks, on every rank."""
        return cast(list[T], self.broadcast(self.gather(value)))

    def together(self, action: Callable[[], T], then: Callable[[], R]) -> tuple[T, R]:
        """Runs `action` on every rank, `then` on rank 0; returns what the first gave here, and the second there.

        When either fails on any rank, every rank raises CheckpointError with the rank and the reason; a defect's
        traceback is in the log of that rank. Raises OutOfTouch when the ranks could not tell each other.
        """
        mine, failure = _attempt(action)
        theirs, reports = None, self._reports(failure)
        if self.rank == 0 and not reports:
            theirs, failure = _attempt(then)
            reports = {} if failure is None else {0: _report(failure)}
        theirs, reports = self._touch(self.broadcast, (theirs, reports), failure)

        if reports:
            raise _combined(reports) from failure
        return cast(T, mine), cast(R, theirs)

    def _reports(self, failure: Exception | None) -> dict[int, _Report]:
        """On rank 0: what went wrong, by rank."""
        reports = self._touch(self.gather, None if failure is None else _report(failure), failure)
        return {rank: report for rank, report in enumerate(reports or ()) if report is not None}

    def _touch(self, collective: Callable[[Any], Any], value: object, failure: Exception | None) -> Any:
        try:
            return collective(value)
        except Exception as error:
            if failure is not None:
                raise _combined({self.rank: _report(failure)}) from failure
            raise OutOfTouch(str(error)) from error


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
