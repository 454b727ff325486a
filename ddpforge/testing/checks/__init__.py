"""The checks, by kind: each is a function of a case that raises Breach, and its docstring says what is expected."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddpforge.testing.cases import Case
    from ddpforge.testing.worlds import Worlds

__all__ = ["CHECKS", "Check", "check", "checks_of"]


@dataclass(frozen=True)
class Check:
    """A named check; one that `starts_ranks` has real processes started."""

    name: str
    kinds: tuple[str, ...]
    starts_ranks: bool
    function: Callable[[Case, Worlds], None]


CHECKS: list[Check] = []


def check(
    name: str, *kinds: str, ranks: bool = False
) -> Callable[[Callable[[Case, Worlds], None]], Callable[[Case, Worlds], None]]:
    """Registers a check of these kinds, or of all."""

    def register(function: Callable[[Case, Worlds], None]) -> Callable[[Case, Worlds], None]:
        CHECKS.append(Check(name, kinds, ranks, function))
        return function

    return register


def checks_of(kind: str) -> list[Check]:
    """The checks of a kind, in the order in which they are run."""
    from ddpforge.testing.checks import callback, common, data, model, optimizer, schedule, strategy, task, tracker

    del callback, common, data, model, optimizer, schedule, strategy, task, tracker  # imported for what they register
    found = [one for one in CHECKS if not one.kinds or kind in one.kinds]
    return sorted(found, key=lambda one: one.function.__module__ != f"{__name__}.common")
