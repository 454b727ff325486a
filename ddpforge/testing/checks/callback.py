"""Checks of callbacks: equal decisions on every rank, and a complete state for a resume."""

from __future__ import annotations

from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable


@check("agrees-on-all-ranks", "callback", ranks=True)
def agrees(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the callback's results and state are equal on both ranks of a run."""
    outcome = worlds.outcome(case, "callback", 2)
    if fault := outcome.get("disagreement"):
        raise Breach(
            "equal results on every rank: if one rank stops alone, the others wait for it forever",
            fault,
            hints=[
                "decide by the methods' arguments, which are equal on all ranks; not by rank, time or random numbers"
            ],
        )


@check("state-round-trip", "callback", ranks=True)
def state_round_trip(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a resumed run ends with the same state of the callback as an uninterrupted one."""
    outcome = worlds.outcome(case, "callback", 2)
    if outcome.get("disagreement"):
        raise NotApplicable("not possible: agrees-on-all-ranks failed")
    if fault := outcome.get("state"):
        raise Breach(
            "the same state with and without an interruption",
            fault,
            hints=["return everything that affects decisions from `state`, and restore it in `load_state`"],
        )
