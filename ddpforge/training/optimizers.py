"""Builds the optimizer that a recipe names: one, or one for each turn of the task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import nn
from torch.optim import Optimizer

from ddpforge.components.building import build
from ddpforge.components.registry import Registry
from ddpforge.recipe.schema import OptimizerComponent
from ddpforge.strategies.several import InTurns
from ddpforge.training.parameter_groups import parameter_groups, parameters_of_turns

__all__ = ["build_optimizer", "check_parameters"]


def build_optimizer(
    registry: Registry, component: OptimizerComponent, model: nn.Module, turns: Sequence[str]
) -> Optimizer:
    """The recipe's optimizer, or one for each of `turns`; raises ValueError where `model` has other parameters."""
    if not turns:
        return cast(
            Optimizer, build(registry, "optimizer", component, params=parameter_groups(model, component.no_decay))
        )
    parts: dict[str, Optimizer] = {}
    for name, chosen in parameters_of_turns(model, _globs(component, turns)).items():
        params = parameter_groups(model, component.no_decay, chosen)
        parts[name] = build(registry, "optimizer", component.turns[name], params=params)
    return InTurns(parts, {name: component.turns[name].clip_norm for name in turns})


def check_parameters(component: OptimizerComponent, model: nn.Module, turns: Sequence[str]) -> None:
    """Raises ValueError where `model` has other parameters than the recipe's optimizer speaks of."""
    parameter_groups(model, component.no_decay)
    if turns:
        parameters_of_turns(model, _globs(component, turns))


def _globs(component: OptimizerComponent, turns: Sequence[str]) -> Mapping[str, Sequence[str]]:
    """The parameters of each turn, as globs."""
    return {name: component.turns[name].parameters or (f"{name}.*",) for name in turns}
