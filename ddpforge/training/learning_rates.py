"""Learning rates at each step: those of the recipe, times their schedules' factors."""

from __future__ import annotations

from collections.abc import Mapping

from torch.optim import Optimizer

from ddpforge.interfaces import Schedule
from ddpforge.strategies.several import InTurns

__all__ = ["Rates"]


class Rates:
    """The learning rates of an optimizer's groups at each step; `schedules` has the one of all as ""."""

    def __init__(self, optimizer: Optimizer, schedules: Mapping[str, Schedule]) -> None:
        self._parts: Mapping[str, Optimizer] = optimizer.parts if isinstance(optimizer, InTurns) else {"": optimizer}
        self._base = {
            name: (schedules.get(name, schedules[""]), [group["lr"] for group in part.param_groups])
            for name, part in self._parts.items()
        }

    def set(self, step: int, wanted: float = 1.0) -> None:
        """Gives every group its rate of `step`, 0 for the first, times the factor that callbacks `wanted`."""
        for name, (schedule, rates) in self._base.items():
            factor = schedule(step) * wanted
            # Looked up again: torch replaces the groups of an optimizer whose state it loads.
            for group, rate in zip(self._parts[name].param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def named(self) -> Mapping[str, float]:
        """The rates, as they are now, of turns and of groups whose last layer has another than the first group."""
        found = {name: part.param_groups[0]["lr"] for name, part in self._parts.items() if name}
        for part in self._parts.values():
            first, *others = part.param_groups
            for each in others:
                if each.get("group") and each["lr"] != first["lr"]:
                    found.setdefault(each["group"], each["lr"])
        return found
