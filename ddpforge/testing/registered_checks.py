"""List of checks. The import of `testing.checks` fills it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["CHECKS", "Check", "check", "checks_of"]

_Function = TypeVar("_Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Check:
    """Named check. With `starts_ranks` it starts real processes. `function` takes a Case and the Worlds."""

    name: str
    kinds: tuple[str, ...]
    starts_ranks: bool
    function: Callable[[Any, Any], None]

    @property
    def common(self) -> bool:
        """True if the check is for all kinds of components, or for several."""
        return len(self.kinds) != 1


CHECKS: list[Check] = []


def check(name: str, *kinds: str, ranks: bool = False) -> Callable[[_Function], _Function]:
    """Registers a check for these kinds, or for all if none is given; `ranks`: it starts processes."""

    def register(function: _Function) -> _Function:
        CHECKS.append(Check(name, kinds, ranks, function))
        return function

    return register


def checks_of(kind: str) -> list[Check]:
    """Returns the checks of a kind in the order of their execution."""
    found = [one for one in CHECKS if not one.kinds or kind in one.kinds]
    return sorted(found, key=lambda one: not one.common)
