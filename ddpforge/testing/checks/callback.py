"""Checks of callbacks: the same decisions on every rank, and a state from which they resume."""

from __future__ import annotations

from ddpforge.testing.cases import Case
from ddpforge.testing.register import check
from ddpforge.testing.report import Breach, NotApplicable
from ddpforge.testing.worlds import Worlds


@check("agrees-on-all-ranks", "callback", ranks=True)
def agrees(case: Case, worlds: Worlds) -> None:
    """The callback returns and keeps the same on both ranks of a run."""
    outcome = worlds.outcome(case, "callback", 2)
    if told := outcome.get("disagreement"):
        raise Breach(
            "the same on every rank: a rank that stops alone leaves the others waiting",
            told,
            hints=[
                "decide from what the methods are told, which is reduced over ranks; not from the rank, time or chance"
            ],
        )


@check("state-round-trip", "callback", ranks=True)
def state_round_trip(case: Case, worlds: Worlds) -> None:
    """A run that is resumed from a checkpoint ends with the state of one that was not interrupted."""
    outcome = worlds.outcome(case, "callback", 2)
    if outcome.get("disagreement"):
        raise NotApplicable("cannot be tried: agrees-on-all-ranks failed")
    if told := outcome.get("state"):
        raise Breach(
            "the same state with and without an interruption",
            told,
            hints=["everything that decides belongs into `state`, and `load_state` takes it back"],
        )
