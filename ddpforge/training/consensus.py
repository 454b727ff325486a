"""Decisions that all ranks share: requests to stop, cadences by the clock, the pace of steps, saved checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ddpforge.interfaces import Ranks
from ddpforge.launchers.verdict import record_halt
from ddpforge.ranks.halt import Halt, NoHalt
from ddpforge.ranks.signals import StopRequests
from ddpforge.training.cadence import Alarm, Stopwatch

__all__ = ["HALT", "STOP", "Agreement", "Ballot", "Consensus", "Interrupted", "Looks"]

STOP = "stop"  # a signal asks this rank to stop
HALT = "halt"  # the run's owner asks all of them
_AGREE_SECONDS = 1.0


class Interrupted(Exception):
    """All ranks leave what they are doing, which the next attempt begins again."""


@dataclass(frozen=True)
class Agreement:
    """The outcome of a ballot, the same on every rank."""

    wanted: frozenset[str] = frozenset()  # wishes that any rank has
    seconds: float = 0.0  # that a step takes, on average over ranks
    all_saved: bool = False  # whether every rank has written its part of a checkpoint

    @property
    def stops(self) -> bool:
        """True when anybody asked to stop."""
        return not self.wanted.isdisjoint((STOP, HALT))

    @property
    def every(self) -> int:
        """The number of steps after which to agree again, so that it costs nothing and nobody waits for long."""
        return max(1, min(1000, int(_AGREE_SECONDS / max(self.seconds, 1e-9))))


class Ballot:
    """Lets ranks agree in a reduction that they make anyway: a ballot's totals ride with those of the metrics.

    `wishes` are the names of all that a rank may want.
    """

    def __init__(self, wishes: Sequence[str]) -> None:
        self._wishes = wishes

    def totals(self, wanted: Collection[str], *, seconds: float, saved: bool) -> dict[str, float]:
        """This rank's ballot."""
        said = {f"?{name}": float(name in wanted) for name in self._wishes}
        return said | {"?seconds": seconds, "?saved": float(saved)}

    def count(self, means: dict[str, float]) -> Agreement:
        """Takes the means of all ranks' ballots out of `means`."""
        wanted = frozenset(name for name in self._wishes if means.pop(f"?{name}") > 0)
        return Agreement(wanted, means.pop("?seconds"), means.pop("?saved") == 1.0)


class Looks:
    """Has all ranks agree about once a second during something that every rank does in equally many parts."""

    def __init__(
        self, ask: Callable[[float], Agreement] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ask` has all ranks agree, given the seconds that a part takes here; without it nobody can interrupt."""
        self._ask, self._clock = ask, clock
        self._every = 1
        self.restart()

    def restart(self) -> None:
        """Begins to count, on all ranks alike."""
        self._parts, self._began = 0, self._clock()

    def after_part(self) -> None:
        """One more part is done; raises Interrupted on all ranks when one was asked to stop."""
        self._parts += 1
        if self._ask is None or self._parts < self._every:
            return
        agreed = self._ask((self._clock() - self._began) / self._parts)
        self._every = agreed.every
        self.restart()
        if agreed.stops:
            raise Interrupted


class Consensus:
    """Lets the ranks of a run agree about once a second on the requests of each of them.

    The ballots ride on the reduction of metrics; `poll` makes a reduction of its own between the parts of something
    else. `agreed` is the newest result.
    """

    def __init__(self, ranks: Ranks, stop: StopRequests, cadences: Sequence[str]) -> None:
        """`cadences` are the names of alarms that may ring on rank 0, whose clock counts for all."""
        self._ranks, self._stop = ranks, stop
        self._ballot = Ballot([STOP, HALT, "end", *cadences])
        self.halt: Halt = NoHalt()
        self.agreed = Agreement()
        self.every = 1  # steps after which ranks agree again
        self.alarms: Sequence[Alarm] = ()
        self.pace = (
            Stopwatch()
        )  # since ranks agreed last; the time of callbacks counts, so that slow ones delay no stop

    def totals(self, *, saved: bool) -> dict[str, float]:
        """Returns this rank's ballot for the reduction of a step, and restarts the pace.

        `saved` says that this rank has written its part of a checkpoint.
        """
        seconds = self.pace.seconds / self.pace.steps
        self.pace.restart()
        requested = self._requests() | {alarm.name for alarm in self.alarms if alarm.rings()}
        return self._ballot.totals(requested, seconds=seconds, saved=saved)

    def take(self, means: dict[str, float]) -> Agreement:
        """Takes the ballots of a step, of all ranks, out of `means`; returns the agreement."""
        self.every = self._count(means).every
        return self.agreed

    def _count(self, means: dict[str, float]) -> Agreement:
        self.agreed = self._ballot.count(means)
        if HALT in self.agreed.wanted:
            record_halt()
            self.halt.obeyed()
        return self.agreed

    def poll(self, seconds: float) -> Agreement:
        """Agrees about stopping alone, where no step is made; `seconds` is the time of a part on this rank."""
        return self._count(self._ranks.average(self._ballot.totals(self._requests(), seconds=seconds, saved=False)))

    def stop_now(self) -> None:
        """Records a stop that every rank knows of: no data came."""
        self.agreed = Agreement(frozenset((STOP,)))

    def _requests(self) -> set[str]:
        return ({STOP} if self._stop.requested else set()) | ({HALT} if self.halt.asked() else set())
