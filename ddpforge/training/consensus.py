"""Decisions that all ranks share: stop requests, wall-clock cadences, the time of a step, saved checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ddpforge.interfaces import Ranks
from ddpforge.ranks.environment import environment
from ddpforge.ranks.run_limits import NoLimits, RunLimits
from ddpforge.ranks.signals import StopRequests
from ddpforge.training.cadence import Alarm, Stopwatch

__all__ = ["HALT", "STOP", "Consensus", "ConsensusInputs", "Decision", "EvaluationInterrupted", "PeriodicCheck"]

STOP = "stop"  # requested by a signal to this rank
HALT = "halt"  # requested by the run's owner, for all ranks
_AGREE_SECONDS = 1.0


class EvaluationInterrupted(Exception):
    """Raised on all ranks to abandon the current work; the next attempt begins it again."""


@dataclass(frozen=True)
class Decision:
    """Outcome of a ballot, the same on every rank."""

    wanted: frozenset[str] = frozenset()  # requests of any rank
    seconds: float = 0.0  # time of a step, averaged over ranks
    all_saved: bool = False  # whether every rank has written its part of a checkpoint

    @property
    def stops(self) -> bool:
        """True if any rank requested a stop."""
        return not self.wanted.isdisjoint((STOP, HALT))

    @property
    def every(self) -> int:
        """Returns the number of steps until the next ballot: about a second of steps, from 1 to 1000."""
        return max(1, min(1000, int(_AGREE_SECONDS / max(self.seconds, 1e-9))))


class ConsensusInputs:
    """Inputs of all ranks within the reduction of metrics: it adds its totals to theirs.

    `wishes` are the names of all requests that a rank may have.
    """

    def __init__(self, wishes: Sequence[str]) -> None:
        self._wishes = wishes

    def totals(self, wanted: Collection[str], *, seconds: float, saved: bool) -> dict[str, float]:
        """Returns this rank's ballot."""
        ballot = {f"?{name}": float(name in wanted) for name in self._wishes}
        return ballot | {"?seconds": seconds, "?saved": float(saved)}

    def count(self, means: dict[str, float]) -> Decision:
        """Removes the means of all ranks' ballots from `means`; returns their agreement."""
        wanted = frozenset(name for name in self._wishes if means.pop(f"?{name}") > 0)
        return Decision(wanted, means.pop("?seconds"), means.pop("?saved") == 1.0)


class PeriodicCheck:
    """Poll of all ranks, about once a second, in a loop that has the same number of parts on every rank."""

    def __init__(
        self, ask: Callable[[float], Decision] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepares polls. `ask` polls all ranks; its argument is this rank's seconds per part. None polls never."""
        self._ask, self._clock = ask, clock
        self._every = 1
        self.restart()

    def restart(self) -> None:
        """Begins a new count; called on all ranks."""
        self._parts, self._began = 0, self._clock()

    def after_part(self) -> None:
        """Counts a finished part; raises EvaluationInterrupted on all ranks if any rank has a stop request."""
        self._parts += 1
        if self._ask is None or self._parts < self._every:
            return
        agreed = self._ask((self._clock() - self._began) / self._parts)
        self._every = agreed.every
        self.restart()
        if agreed.stops:
            raise EvaluationInterrupted


class Consensus:
    """Consensus of all ranks, about once a second, on the requests of each rank.

    The ballots are part of the reduction of metrics. `poll` makes its own reduction, between the parts of other work.
    `agreed` is the newest result.
    """

    def __init__(
        self, ranks: Ranks, stop: StopRequests, cadences: Sequence[str], limits: RunLimits | None = None
    ) -> None:
        """Prepares ballots; `cadences` are the names of the alarms that may ring, by rank 0's clock."""
        self._ranks, self.stop = ranks, stop
        self._ballot = ConsensusInputs([STOP, HALT, "end", *cadences])
        self.halt: RunLimits = limits or NoLimits()
        self.agreed = Decision()
        self.every = 1  # steps between two ballots
        self._alarms: Sequence[Alarm] = ()
        self.pace = Stopwatch()  # since the last ballot; includes callbacks, so that slow ones delay no stop

    def restart(self, alarms: Sequence[Alarm]) -> None:
        """Begins to measure the pace, and watches `alarms` on this rank: a rank without any receives the result."""
        self._alarms = alarms
        self.pace.restart()

    def totals(self, *, saved: bool) -> dict[str, float]:
        """Returns this rank's ballot for the reduction of a step, and restarts the pace.

        `saved`: this rank has written its part of a checkpoint.
        """
        seconds = self.pace.seconds / self.pace.steps
        self.pace.restart()
        requested = self._requests() | {alarm.name for alarm in self._alarms if alarm.rings()}
        return self._ballot.totals(requested, seconds=seconds, saved=saved)

    def take(self, means: dict[str, float]) -> Decision:
        """Removes all ranks' ballots of a step from `means`; returns the agreement."""
        self.every = self._count(means).every
        return self.agreed

    def _count(self, means: dict[str, float]) -> Decision:
        self.agreed = self._ballot.count(means)
        if HALT in self.agreed.wanted:
            environment().on_halt()
            self.halt.acknowledge()
        return self.agreed

    def poll(self, seconds: float) -> Decision:
        """Polls all ranks for stop requests only, outside of a step; `seconds` is this rank's time per part."""
        return self._count(
            self._ranks.all_reduce_mean(self._ballot.totals(self._requests(), seconds=seconds, saved=False))
        )

    def stop_now(self) -> None:
        """Records a stop that all ranks detected themselves: no data arrived."""
        self.agreed = Decision(frozenset((STOP,)))

    def _requests(self) -> set[str]:
        return ({STOP} if self.stop.requested else set()) | ({HALT} if self.halt.stop_requested() else set())
