"""Optimizer and schedule `lightning`: the results of a LightningModule's `configure_optimizers`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ddpforge.errors import UsageError

from ddpforge_lightning.module import Run, checked, others_named, overrides, run_of

if TYPE_CHECKING:
    from ddpforge.interfaces import Horizon, Schedule
    from torch import nn
    from torch.optim import Optimizer

__all__ = ["lightning_optimizer", "lightning_schedule"]

ddpforge_plugin_api = 3

_SCHEDULED = ("lr", "beta1", "momentum", "weight_decay")
_KEYS = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


@dataclass(frozen=True)
class _Timed:
    """Scheduler of torch, stepped every `frequency` steps of an epoch or every `frequency` epochs."""

    scheduler: Any
    interval: str
    frequency: int


def lightning_optimizer(params: list[dict[str, Any]], model: nn.Module) -> Optimizer:
    """Builds the optimizer of the model's `configure_optimizers`, with its groups and their options.

    Raises UsageError for several optimizers, for one that leaves trainable parameters out, and for a scheduler that
    changes options without a schedule in the recipe.
    """
    optimizer, timed = _configured(model)
    trainable = {id(one) for one in model.parameters() if one.requires_grad}
    if {id(one) for group in params for one in group["params"]} != trainable:
        return _again(optimizer, params)  # a strategy tries the optimizer on small weights
    table = _table(timed, optimizer, model)
    _check_scheduled(model, table)
    if len(params) > 1:
        raise UsageError(
            "optimizer lightning has the groups of configure_optimizers, but the recipe makes groups too",
            hints=["remove no_decay, layer_decay and groups from [optimizer]"],
            key="optimizer",
        )
    names = dict(zip(map(id, params[0]["params"]), params[0]["names"], strict=True))
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        mine = [one for one in group["params"] if id(one) in names]
        own = {key: value for key, value in group.items() if key in optimizer.defaults}
        for name, values in table.items():
            _set(own, name, max(values[index]))  # the schedule's factor 1
        groups.append({**own, "params": mine, "names": [names[id(one)] for one in mine]})
    found = {name for group in groups for name in group["names"]}
    if left := [name for name in names.values() if name not in found]:
        raise UsageError(
            f"configure_optimizers leaves out the parameter `{left[0]}`",
            hints=[f'freeze it: train.freeze = ["{left[0]}"]', "or add it to the optimizer"],
            key="optimizer",
        )
    return _again(optimizer, groups)


def lightning_schedule(horizon: Horizon, model: nn.Module, scheduled: str) -> Schedule:
    """Returns the factors of the option `scheduled`, which the schedulers of `configure_optimizers` set.

    The schedulers run once, before training, over all steps. The factor 1 is the largest value of the option. Without a
    scheduler it is 1 at every step.

    Raises UsageError for ReduceLROnPlateau, for a run whose length in steps is not known, and for groups of parameters
    whose values are not multiples of each other.
    """
    run_of(checked(model), horizon).scheduled.add(scheduled)
    optimizer, timed = _configured(model)
    table = _table(timed, optimizer, model)
    if scheduled not in table:
        if scheduled != "lr":
            key = f"optimizer.schedules.{scheduled}"
            raise UsageError(f"no scheduler of configure_optimizers changes {scheduled}", hints=["remove it"], key=key)
        return partial(_factor, run_of(model), (1.0,))
    first, *others = ([value / (max(values) or 1.0) for value in values] for values in table[scheduled])
    for other in others:
        if any(abs(one - two) > 1e-9 for one, two in zip(first, other, strict=True)):
            raise UsageError(
                f"the groups of the optimizer have schedules of {scheduled} with different shapes",
                hints=["use one shape for all groups: their values may differ by a factor"],
                key="schedule",
            )
    return partial(_factor, run_of(model), first)


def _factor(run: Run, factors: Sequence[float], step: int) -> float:
    """Returns the factor of a step (0 for the first); `self.global_step` is then this step."""
    run.step = step
    return factors[min(step, len(factors) - 1)]


# ---------------------------------------------------------------------------------------------- configure_optimizers
def _configured(model: nn.Module) -> tuple[Optimizer, list[_Timed]]:
    """Calls `configure_optimizers`; returns its optimizer and its schedulers."""
    module = checked(model)
    run_of(module)
    if not overrides(module, "configure_optimizers"):
        raise UsageError(
            f"{type(module).__name__} has no configure_optimizers",
            hints=['write it, or name an optimizer: optimizer.use = "adamw"'],
            key="optimizer.use",
        )
    with others_named(module):
        return _read(module.configure_optimizers())


def _read(returned: Any) -> tuple[Optimizer, list[_Timed]]:
    """Returns the optimizer and the schedulers of a result of `configure_optimizers`."""
    optimizers, schedulers = _parts(returned)
    if len(optimizers) != 1:
        raise UsageError(
            f"configure_optimizers returns {len(optimizers)} optimizers; ddpforge takes one",
            hints=["write a task with `updates` for several: [optimizer.updates.NAME] has an optimizer for each"],
            key="optimizer.use",
        )
    _, *parameters = inspect.signature(type(optimizers[0]).step).parameters.values()
    if any(one.default is one.empty and one.kind <= one.POSITIONAL_OR_KEYWORD for one in parameters[:1]):
        raise UsageError(
            f"{type(optimizers[0]).__name__} of configure_optimizers computes the loss itself, several times a step",
            hints=['write [optimizer] use = "lbfgs", which makes one iteration a step', "or a first-order optimizer"],
            key="optimizer.use",
        )
    return optimizers[0], [_timed(one) for one in schedulers]


def _parts(returned: Any) -> tuple[list[Any], list[Any]]:
    """Returns the optimizers and the schedulers in any form that Lightning takes."""
    from torch.optim import Optimizer

    if isinstance(returned, Optimizer):
        return [returned], []
    if isinstance(returned, Mapping) and "optimizer" in returned:
        scheduler = returned.get("lr_scheduler")
        return [returned["optimizer"]], [] if scheduler is None else [scheduler]
    if isinstance(returned, Sequence) and len(returned) == 2 and isinstance(returned[0], list | tuple):
        second = returned[1]
        return list(returned[0]), list(second) if isinstance(second, list | tuple) else [second]
    if isinstance(returned, Sequence):
        found = [_parts(one) for one in returned]
        return [one for first, _ in found for one in first], [one for _, second in found for one in second]
    raise UsageError(
        f"configure_optimizers returns {type(returned).__name__}, not an optimizer",
        hints=["return an optimizer, or a dict with `optimizer` and `lr_scheduler`"],
        key="optimizer.use",
    )


def _timed(given: Any) -> _Timed:
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    config = dict(given) if isinstance(given, Mapping) else {"scheduler": given}
    if unknown := sorted(config.keys() - _KEYS):
        raise UsageError(f"the lr_scheduler config has an unknown key `{unknown[0]}`", key="schedule")
    if isinstance(config["scheduler"], ReduceLROnPlateau):
        raise UsageError(
            "configure_optimizers returns ReduceLROnPlateau, which depends on a metric, not on the step",
            hints=['return the optimizer alone, and write [callbacks.plateau] use = "reduce_on_plateau"'],
            key="schedule",
        )
    return _Timed(config["scheduler"], config.get("interval", "epoch"), config.get("frequency", 1))


# ---------------------------------------------------------------------------------------------- values at each step
def _table(timed: Sequence[_Timed], optimizer: Optimizer, model: Any) -> dict[str, list[list[float]]]:
    """Returns the values of each option that the schedulers change: of each group, at each step of the run."""
    if not timed:
        return {}
    run = run_of(model)
    if run.table is not None:
        return run.table
    total, epoch = run.estimated_stepping_batches, run.horizon and run.horizon.steps_per_epoch
    if not epoch and any(one.interval == "epoch" for one in timed):
        raise UsageError(
            'a scheduler has the interval "epoch", but this data has no epochs of a fixed length',
            hints=['return {"scheduler": …, "interval": "step"}'],
            key="schedule",
        )
    found: dict[str, list[list[float]]] = {}
    for name in _SCHEDULED:
        if all(_get(group, name) is not None for group in optimizer.param_groups):
            found[name] = [[] for _ in optimizer.param_groups]
    with warnings.catch_warnings():
        # The optimizer makes no step here: its gradients may be from anywhere.
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*")
        for step in range(total):
            for name, groups in found.items():
                for group, values in zip(optimizer.param_groups, groups, strict=True):
                    values.append(_get(group, name) or 0.0)
            if step < total - 1:
                _advance(timed, step, epoch or total)
    changed = {name: groups for name, groups in found.items() if any(len({*values}) > 1 for values in groups)}
    run.table = {"lr": found["lr"], **changed}
    return run.table


def _advance(timed: Sequence[_Timed], step: int, epoch: int) -> None:
    """Steps the schedulers that are due after `step`, as Lightning does: first those of steps, then of epochs."""
    done = step % epoch + 1
    for one in timed:
        if one.interval == "step" and done % one.frequency == 0:
            one.scheduler.step()
    for one in timed:
        if one.interval == "epoch" and done == epoch and (step // epoch + 1) % one.frequency == 0:
            one.scheduler.step()


def _check_scheduled(model: Any, table: Mapping[str, Any]) -> None:
    """Raises UsageError if the schedulers change an option, and the recipe has no schedule for it."""
    for name in table.keys() - run_of(model).scheduled:
        where = "schedule" if name == "lr" else f"optimizer.schedules.{name}"
        raise UsageError(
            f"a scheduler of configure_optimizers changes {name}, but the recipe has another schedule for it",
            hints=[f'write [{where}] use = "lightning"'],
            key="schedule" if name == "lr" else "optimizer",
        )


def _get(group: Mapping[str, Any], name: str) -> float | None:
    value = group["betas"][0] if name == "beta1" and "betas" in group else group.get(name)
    return float(value) if value is not None and not isinstance(value, bool) else None


def _set(group: dict[str, Any], name: str, value: float) -> None:
    if name == "beta1":
        group["betas"] = (value, *group["betas"][1:])
    else:
        group[name] = value


def _again(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Builds the optimizer anew: a scheduler has wrapped the `step` of the given one, and added options to its groups.

    Raises UsageError if the class does not take its own defaults.
    """
    kind: Callable[..., Optimizer] = type(optimizer)
    takes = inspect.signature(kind).parameters
    options = {key: value for key, value in optimizer.defaults.items() if key in takes}
    try:
        return kind(groups, **options)
    except TypeError as error:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be built from its groups: {error}", key="optimizer"
        ) from error
