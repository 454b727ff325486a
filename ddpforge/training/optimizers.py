"""Builds the optimizer that a recipe names: one, one per update of the task, or several for groups of parameters."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ddpforge.components.registry import Registry, build
from ddpforge.recipe.schema import Component, OptimizerComponent, settings_of
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer, CompositeOptimizer, remember_constructor
from ddpforge.training.blocks import find_blocks
from ddpforge.training.learning_rates import remember_initial
from ddpforge.training.parameter_groups import (
    layerwise_lr_groups,
    local_groups,
    parameter_groups,
    parameters_by_group,
    parameters_by_update,
)

__all__ = ["build_optimizer", "check_parameters", "shares"]


def build_optimizer(
    registry: Registry,
    component: OptimizerComponent,
    model: nn.Module,
    updates: Sequence[str],
    blocks: Sequence[str] = (),
) -> Optimizer:
    """Builds the recipe's optimizer, or one for each of `updates`; `blocks` are the classes in train.blocks.

    Raises ValueError if `model` lacks parameters or blocks that the recipe names, and UsageError if the optimizer lacks
    an option of [optimizer.schedules].
    """
    if updates:
        parts: dict[str, Optimizer] = {}
        for name, chosen in parameters_by_update(model, _globs(component, updates)).items():
            params = parameter_groups(model, component.no_decay, chosen)
            parts[name] = _built(registry, component.updates[name], model, params)
        optimizer: Optimizer = AlternatingOptimizer(
            parts, {name: component.updates[name].clip_norm for name in updates}
        )
    elif component.groups:
        optimizer = _scaled(_in_groups(registry, component, model, blocks))
    else:
        optimizer = _scaled(_built(registry, component, model, local_groups(_groups(component, model, blocks))))
    remember_initial(optimizer, component.schedules)
    return optimizer


def _built(registry: Registry, component: Component, model: nn.Module, groups: Sequence[dict[str, Any]]) -> Optimizer:
    """Builds the component's optimizer; strategies can build another one with the same settings, to try it out."""
    make = partial(build, registry, "optimizer", component, model=model)
    optimizer: Optimizer = make(params=groups)
    remember_constructor(optimizer, lambda groups: make(params=groups))
    return optimizer


def _groups(
    component: OptimizerComponent, model: nn.Module, blocks: Sequence[str], among: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Returns the parameters in groups with and without weight decay and, if `layer_decay` is set, by layer."""
    groups = parameter_groups(model, component.no_decay, among)
    if component.layer_decay is None:
        return groups
    return layerwise_lr_groups(groups, model, find_blocks(model, blocks), component.layer_decay)


def _scaled(optimizer: Optimizer) -> Optimizer:
    """Multiplies the learning rate of each group of a layer by its `scale`."""
    # Only the built optimizer has the base rate, which may be the default of its class.
    for group in optimizer.param_groups:
        if (scale := group.pop("scale", None)) is not None:
            group["lr"] *= scale
    return optimizer


def _in_groups(registry: Registry, component: OptimizerComponent, model: nn.Module, blocks: Sequence[str]) -> Optimizer:
    """Builds the recipe's optimizer with the settings of each group, and one optimizer more for each other `use`."""
    params: dict[str, list[dict[str, Any]]] = {"": []}
    for name, chosen in _chosen(component, model).items():
        group = component.groups.get(name, component)
        shares = group.use == component.use
        own = {"group": name, **(settings_of(group, component) if shares else {})}
        # Parameters in `no_decay` have no weight decay in any group.
        mine = [own | each for each in local_groups(_groups(component, model, blocks, chosen))]
        params.setdefault("" if shares else name, []).extend(mine)
    parts: dict[str, Optimizer] = {
        name: _built(registry, component.groups.get(name, component), model, groups)
        for name, groups in params.items()
        if groups
    }
    return CompositeOptimizer(parts) if len(parts) > 1 else next(iter(parts.values()))


def check_parameters(
    registry: Registry,
    component: OptimizerComponent,
    model: nn.Module,
    updates: Sequence[str],
    blocks: Sequence[str] = (),
) -> None:
    """Raises ValueError if `model` lacks parameters or blocks that the recipe's optimizer names."""
    parameter_groups(model, component.no_decay)
    if component.layer_decay is not None:
        repeated = find_blocks(model, blocks)
        if updates:
            raise ValueError("layer_decay does not work with updates; set the `lr` of each of [optimizer.updates]")
        if not repeated:
            raise ValueError("layer_decay needs repeated blocks, and the model has none; name classes in train.blocks")
    if updates:
        parameters_by_update(model, _globs(component, updates))
    for name, chosen in _chosen(component, model).items() if component.groups else ():
        if (group := component.groups.get(name)) and group.use != component.use:
            build(registry, "optimizer", group, params=parameter_groups(model, component.no_decay, chosen), model=model)


def shares(component: OptimizerComponent, model: nn.Module, updates: Sequence[str]) -> list[str]:
    """Describes each update or group: its optimizer and the size of its part of `model`; empty if there are none."""
    if updates:
        found: Mapping[str, Sequence[str]] = parameters_by_update(model, _globs(component, updates))
    else:
        found = _chosen(component, model) if component.groups else {}
    parts: Mapping[str, Component] = {**component.updates, **component.groups}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return [
        f"{part or 'all others'}: {parts.get(part, component).use}, "
        f"{len(names)} tensors with {sum(sizes[name] for name in names):,} parameters"
        for part, names in found.items()
    ]


def _chosen(component: OptimizerComponent, model: nn.Module) -> Mapping[str, Sequence[str]]:
    groups = parameters_by_group(model, {name: group.parameters for name, group in component.groups.items()})
    return {name: chosen for name, chosen in groups.items() if chosen}


def _globs(component: OptimizerComponent, updates: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """Returns the globs of each update's parameters."""
    return {name: component.updates[name].parameters or (f"{name}.*",) for name in updates}
