"""Builds a component and holds it to its kind."""

from __future__ import annotations

from typing import Any

from ddpforge.components.kinds import KINDS
from ddpforge.components.registry import Chosen, Registry
from ddpforge.errors import ExitCode, PluginError

__all__ = ["WrongKind", "build"]


class WrongKind(PluginError):
    """A recipe names something that is no component of the kind that belongs there: the recipe's fault."""

    exit_code = ExitCode.USAGE


def build(registry: Registry, kind: str, component: Chosen, **given: Any) -> Any:
    """The component, built; raises PluginError also when it is not of its kind."""
    built = registry.build(kind, component, **given)
    if expected := KINDS[kind].mismatch(built):
        name = type(built).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise WrongKind(
            f"{kind} `{component.use}` is {article} {name}, and must be {expected}",
            hints=["`ddpforge.interfaces` says what a component of each kind must be"],
        )
    return built
