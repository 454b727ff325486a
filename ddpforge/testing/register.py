"""The list of checks, which `testing.checks` fills: the package's own import does that, before anybody reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["CHECKS", "Check", "check", "checks_of"]

_Function = TypeVar("_Function", bound=Callable[..., None])


@dataclass(frozen=True)
class Check:
    """A named check; one that `starts_ranks` has real processes started. The `function` takes a Case and the Worlds."""

    name: str
    kinds: tuple[str, ...]
    starts_ranks: bool
    function: Callable[[Any, Any], None]

    @property
    def common(self) -> bool:
        """True if it is a check of components of all kinds, or of several."""
        return len(self.kinds) != 1


CHECKS: list[Check] = []


def check(name: str, *kinds: str, ranks: bool = False) -> Callable[[_Function], _Function]:
    """Registers a check of these kinds, or of all."""

    def register(function: _Function) -> _Function:
        CHECKS.append(Check(name, kinds, ranks, function))
        return function

    return register


def checks_of(kind: str) -> list[Check]:
    """The checks of a kind, in the order in which they are run."""
    found = [one for one in CHECKS if not one.kinds or kind in one.kinds]
    return sorted(found, key=lambda one: not one.common)
