"""The ranks that write one checkpoint: each does its part, and all of them learn whether all of them could."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from ddpforge.errors import CheckpointError, ForgeError

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

    def together(self, action: Callable[[], T], then: Callable[[], R]) -> tuple[T, R]:
        """Runs `action` on every rank, `then` on rank 0; returns what the first gave here, and the second there.

        When either fails on any rank, every rank raises CheckpointError with the rank and the reason; one that met a
        defect raises that. Raises OutOfTouch when the ranks could not tell each other.
        """
        mine, failure = _attempt(action)
        theirs, reports = None, self._reports(failure)
        if self.rank == 0 and not reports:
            theirs, failure = _attempt(then)
            reports = {} if failure is None else {0: _report(failure)}
        theirs, reports = self._touch(self.broadcast, (theirs, reports), failure)

        if failure is not None and not isinstance(failure, ForgeError):
            raise failure
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
            raise failure or OutOfTouch(str(error)) from error


def _attempt(action: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return action(), None
    except Exception as error:
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
