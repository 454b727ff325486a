"""Learning rates at each step: the rates of the recipe times the factors of their schedules."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from ddpforge.interfaces import Schedule
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer

__all__ = ["Rates"]


class Rates:
    """Learning rates of an optimizer's groups at each step; `schedules[""]` is for updates without their own."""

    def __init__(self, optimizer: Optimizer, schedules: Mapping[str, Schedule]) -> None:
        self._parts: Mapping[str, Optimizer] = (
            optimizer.parts if isinstance(optimizer, AlternatingOptimizer) else {"": optimizer}
        )
        self._base = {
            name: (schedules.get(name, schedules[""]), [group["lr"] for group in part.param_groups])
            for name, part in self._parts.items()
        }

    def set(self, step: int, wanted: float = 1.0) -> None:
        """Sets the rate of every group for `step` (0 for the first), times the factor `wanted` by callbacks."""
        for name, (schedule, rates) in self._base.items():
            factor = schedule(step) * wanted
            # Reads `param_groups` at each step: torch replaces the groups when it loads an optimizer's state.
            for group, rate in zip(self._parts[name].param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def named(self) -> Mapping[str, float]:
        """Returns the current rates by name: of updates, and of groups with another rate than the first group.

        With `layer_decay`, the rate of a group is that of its last layer with another rate.
        """
        found = {name: part.param_groups[0]["lr"] for name, part in self._parts.items() if name}
        for part in self._parts.values():
            first, *others = part.param_groups
            for each in others:
                if each.get("group") and each["lr"] != first["lr"]:
                    found.setdefault(each["group"], each["lr"])
        return found
