"""What a component of each kind must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from ddpforge.errors import ExitCode, PluginError
from ddpforge.interfaces import Callback, Metric, Strategy, Task, Tracker

if TYPE_CHECKING:
    from ddpforge.components.registry import Registry
    from ddpforge.recipe.schema import Component

__all__ = ["BASES", "WrongKind", "build", "unlike"]

BASES: Mapping[str, type] = {
    "task": Task,
    "metric": Metric,
    "tracker": Tracker,
    "callback": Callback,
    "strategy": Strategy,
    "model": nn.Module,
    "optimizer": Optimizer,
}
"""The class that a kind's components derive from; data and schedules need none."""


class WrongKind(PluginError):
    """What a recipe names is no component of the kind that belongs there: the recipe's fault."""

    exit_code = ExitCode.USAGE


def unlike(kind: str, built: Any) -> str | None:
    """What a component of a kind is, where `built` is something else."""
    if kind == "schedule":
        return None if callable(built) else "a function of the step"
    if kind == "data":
        samples = hasattr(built, "__iter__") or (hasattr(built, "__len__") and hasattr(built, "__getitem__"))
        return None if samples else "data with __len__ and __getitem__, or with __iter__"
    home = {"model": "torch.nn", "optimizer": "torch.optim"}.get(kind, "ddpforge.interfaces")
    return None if isinstance(built, BASES[kind]) else f"a {home}.{BASES[kind].__name__}"


def build(registry: Registry, kind: str, component: Component, **given: Any) -> Any:
    """The component, built; raises PluginError also when it is not of its kind."""
    built = registry.build(kind, component, **given)
    if expected := unlike(kind, built):
        name = type(built).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise WrongKind(
            f"{kind} `{component.use}` is {article} {name}, and must be {expected}",
            hints=["`ddpforge.interfaces` says what a component of each kind must be"],
        )
    return built
