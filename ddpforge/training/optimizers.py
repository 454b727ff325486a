"""Builds the optimizer that a recipe names: one, one for each turn of the task, or several for groups of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from ddpforge.components.building import build
from ddpforge.components.registry import Registry
from ddpforge.recipe.schema import Component, OptimizerComponent
from ddpforge.strategies.several import InTurns, Several
from ddpforge.training.parameter_groups import parameter_groups, parameters_of_groups, parameters_of_turns

__all__ = ["build_optimizer", "check_parameters", "settings_of", "shares"]


def build_optimizer(
    registry: Registry, component: OptimizerComponent, model: nn.Module, turns: Sequence[str]
) -> Optimizer:
    """The recipe's optimizer, or one for each of `turns`; raises ValueError where `model` has other parameters."""
    if turns:
        return _in_turns(registry, component, model, turns)
    if component.groups:
        return _in_groups(registry, component, model)
    return cast(Optimizer, build(registry, "optimizer", component, params=parameter_groups(model, component.no_decay)))


def _in_turns(registry: Registry, component: OptimizerComponent, model: nn.Module, turns: Sequence[str]) -> Optimizer:
    parts: dict[str, Optimizer] = {}
    for name, chosen in parameters_of_turns(model, _globs(component, turns)).items():
        params = parameter_groups(model, component.no_decay, chosen)
        parts[name] = build(registry, "optimizer", component.turns[name], params=params)
    return InTurns(parts, {name: component.turns[name].clip_norm for name in turns})


def _in_groups(registry: Registry, component: OptimizerComponent, model: nn.Module) -> Optimizer:
    """Groups of the recipe's optimizer, with settings of their own; and beside it those that have another."""
    params: dict[str, list[dict[str, Any]]] = {"": []}
    for name, chosen in _chosen(component, model).items():
        group = component.groups.get(name, component)
        shares = group.use == component.use
        own = {"group": name, **(settings_of(group, component) if shares else {})}
        # What is exempt from weight decay is so in every group.
        mine = [own | each for each in parameter_groups(model, component.no_decay, chosen)]
        params.setdefault("" if shares else name, []).extend(mine)
    parts: dict[str, Optimizer] = {
        name: build(registry, "optimizer", component.groups.get(name, component), params=groups)
        for name, groups in params.items()
        if groups
    }
    return Several(parts) if len(parts) > 1 else next(iter(parts.values()))


def check_parameters(registry: Registry, component: OptimizerComponent, model: nn.Module, turns: Sequence[str]) -> None:
    """Raises ValueError where `model` has other parameters than the recipe's optimizer speaks of."""
    parameter_groups(model, component.no_decay)
    if turns:
        parameters_of_turns(model, _globs(component, turns))
    for name, chosen in _chosen(component, model).items() if component.groups else ():
        if (group := component.groups.get(name)) and group.use != component.use:
            build(registry, "optimizer", group, params=parameter_groups(model, component.no_decay, chosen))


def shares(component: OptimizerComponent, model: nn.Module, turns: Sequence[str]) -> list[str]:
    """Says of each turn, or group, how much of `model` it has and which optimizer; nothing where there are none."""
    if turns:
        found: Mapping[str, Sequence[str]] = parameters_of_turns(model, _globs(component, turns))
    else:
        found = _chosen(component, model) if component.groups else {}
    parts: Mapping[str, Component] = {**component.turns, **component.groups}
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    return [
        f"{part or 'all others'}: {parts.get(part, component).use}, "
        f"{len(names)} tensors with {sum(sizes[name] for name in names):,} parameters"
        for part, names in found.items()
    ]


def settings_of(group: Component, component: Component) -> dict[str, Any]:
    """The options of a group that are not those of the optimizer around it."""
    return {key: value for key, value in group.options.items() if value != component.options.get(key)}


def _chosen(component: OptimizerComponent, model: nn.Module) -> Mapping[str, Sequence[str]]:
    groups = parameters_of_groups(model, {name: group.parameters for name, group in component.groups.items()})
    return {name: chosen for name, chosen in groups.items() if chosen}


def _globs(component: OptimizerComponent, turns: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """The parameters of each turn, as globs."""
    return {name: component.turns[name].parameters or (f"{name}.*",) for name in turns}
