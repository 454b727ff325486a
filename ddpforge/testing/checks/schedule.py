"""Checks of schedules: a finite factor for every step that depends only on the step."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, blame, source_of


@check("finite", "schedule")
def finite(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the factor is finite and at least 0 for every step, and for 10 steps after the run."""
    schedule, total = _schedule(case)
    for step in range(total + 10):
        value = _at(case, schedule, step)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Breach("a plain number", f"{value!r} at step {step}", where=_where(case, schedule))
        if not math.isfinite(value) or value < 0:
            raise Breach(
                "a finite factor of at least 0", f"{value} at step {step} of {total}", where=_where(case, schedule)
            )


@check("pure", "schedule")
def pure(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a step's factor is the same in any order of calls, and from a schedule that is built again."""
    schedule, total = _schedule(case)
    first = [_at(case, schedule, step) for step in range(total)]
    order = random.Random(0).sample(range(total), total)
    for what, other in (("called again for the steps in another order", schedule), ("built again", _schedule(case)[0])):
        for step in order:
            if (value := _at(case, other, step)) != first[step]:
                raise Breach(
                    "a pure function of the step: no checkpoint saves its state, and a resume begins anywhere",
                    f"{value} at step {step} when {what}, and {first[step]} before",
                    where=_where(case, schedule),
                    hints=["compute the factor only from `step`; keep no state, use no random numbers"],
                )


def _schedule(case: Case) -> tuple[Callable[[int], float], int]:
    given = case.given()
    schedule = case.build(**given)
    if not callable(schedule):
        raise Breach("a function of the step", f"a {type(schedule).__name__}")
    return schedule, given["horizon"].total or 100


def _at(case: Case, schedule: Callable[[int], float], step: int) -> float:
    try:
        return schedule(step)
    except Exception as error:
        raise blame(error, f"a factor for step {step}", case.component) from error


def _where(case: Case, schedule: Callable[[int], float]) -> str:
    found = source_of(schedule)
    return found if ":" in found else case.where
