"""Learning rates and other options of the optimizer at each step: the recipe's values times their schedules."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch.optim import Optimizer

from ddpforge.errors import UsageError
from ddpforge.interfaces import Schedule
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer

__all__ = ["Rates", "check_scheduled_values", "remember_initial"]

_BETAS = {"beta1": 0, "beta2": 1}
_FRACTIONS = {*_BETAS, "momentum", "alpha", "rho"}  # less than 1 in torch's optimizers


def remember_initial(optimizer: Optimizer, names: Collection[str]) -> None:
    """Copies the options that have a schedule, e.g. `weight_decay` to `initial_weight_decay` in every group.

    Raises UsageError for an option that the optimizer does not have as a number other than 0.
    """
    for name in names:
        _check_scheduled(optimizer, name)
        for group in optimizer.param_groups:
            if _option(group, name) is not None:
                group[f"initial_{_key(name)}"] = group[_key(name)]


def _check_scheduled(optimizer: Optimizer, name: str) -> None:
    values, key = [_option(group, name) for group in optimizer.param_groups], f"optimizer.schedules.{name}"
    if name == "lr":
        raise UsageError("the learning rate has its schedule in [schedule]", hints=["move this table there"], key=key)
    if all(value is None for value in values):
        first = optimizer.param_groups[0]
        numbers = {*_BETAS, *first} if "betas" in first else {*first}
        numbers = {each for each in numbers - {"lr"} if not each.startswith("initial_")}
        possible = sorted(each for each in numbers if _option(first, each) is not None)
        message = f"{type(optimizer).__name__} has no number `{name}` that a schedule could change"
        raise UsageError(message, hints=[f"it has {', '.join(possible)}"] if possible else [], key=key)
    if not any(values):
        message = f"{name} is 0, so its schedule changes nothing"
        raise UsageError(message, hints=[f"set {name} in [optimizer]"], key=key)


def _key(name: str) -> str:
    return "betas" if name in _BETAS else name


def _option(group: Mapping[str, Any], name: str, prefix: str = "") -> float | None:
    """Returns the value of a group's option; None if the group has no number of this name."""
    found = group.get(prefix + _key(name))
    if name in _BETAS and found is not None:
        found = found[_BETAS[name]]
    return None if isinstance(found, bool) or not isinstance(found, int | float) else float(found)


def _set_option(group: dict[str, Any], name: str, value: float) -> None:
    if name in _BETAS:
        others = [*group["betas"]]
        others[_BETAS[name]] = value
        group["betas"] = tuple(others)
    else:
        group[name] = value


def check_scheduled_values(optimizer: Optimizer, schedules: Mapping[str, Schedule], total: int | None) -> None:
    """Raises UsageError if a schedule raises betas or momentum to 1 or more, at one of a hundred steps of the run."""
    last = (total or 100) - 1
    for name in schedules.keys() & _FRACTIONS:
        for group in optimizer.param_groups:
            initial = _option(group, name, "initial_") or 0.0
            for step in (last * part // 99 for part in range(100)):
                if (value := initial * schedules[name](step)) >= 1:
                    raise UsageError(
                        f"the schedule of {name} raises it from {initial:g} to {value:g} at step {step}, "
                        "but it must be less than 1",
                        hints=["a schedule returns a factor on the option's value in [optimizer]"],
                        key=f"optimizer.schedules.{name}",
                    )


class Rates:
    """Learning rates of an optimizer's groups at each step; `schedules[""]` is for updates without their own.

    `values` has the schedules of other options by name, e.g. "weight_decay" or "beta1"; see `remember_initial`. Groups
    in `starts` have the rate 0 before that step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        schedules: Mapping[str, Schedule],
        values: Mapping[str, Schedule] = {},
        starts: Mapping[str, int] = {},
    ) -> None:
        self._starts = starts
        self.optimizer = optimizer
        self._values = {
            name: (schedule, [_option(group, name, "initial_") for group in optimizer.param_groups])
            for name, schedule in values.items()
        }
        self._parts: Mapping[str, Optimizer] = (
            optimizer.parts if isinstance(optimizer, AlternatingOptimizer) else {"": optimizer}
        )
        self._base = {
            name: (schedules.get(name, schedules[""]), [group["lr"] for group in part.param_groups])
            for name, part in self._parts.items()
        }

    def set(self, step: int, wanted: float = 1.0) -> None:
        """Sets every group for `step` (0 for the first); the factor `wanted` of callbacks is for the rates only."""
        for name, (schedule, rates) in self._base.items():
            factor = schedule(step) * wanted
            # Reads `param_groups` at each step: torch replaces the groups when it loads an optimizer's state.
            for group, rate in zip(self._parts[name].param_groups, rates, strict=True):
                begun = step >= self._starts.get(group.get("group", ""), 0)
                group["lr"] = rate * factor if begun else 0.0
        for name, (schedule, initial) in self._values.items():
            factor = schedule(step)
            for group, value in zip(self.optimizer.param_groups, initial, strict=True):
                if value is not None:
                    _set_option(group, name, value * factor)

    def scheduled(self) -> Mapping[str, float]:
        """Returns the current values of the other scheduled options: in the first group that has more than 0."""
        found: dict[str, float] = {}
        for name, (_, initial) in self._values.items():
            first = next((index for index, value in enumerate(initial) if value), 0)
            found[name] = _option(self.optimizer.param_groups[first], name) or 0.0
        return found

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
