"""Tries out what only the optimizer itself can tell: whether it takes its options. Needs torch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ddpforge.components.registry import NotImported
from ddpforge.errors import PluginError, RecipeError
from ddpforge.recipe.report import dotted

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ddpforge.components.registry import Registry
    from ddpforge.recipe.load import LoadedRecipe
    from ddpforge.recipe.origins import KeyPath
    from ddpforge.recipe.schema import Component


def check_optimizer(loaded: LoadedRecipe, registry: Registry) -> None:
    """Builds the recipe's optimizers over one small parameter; raises RecipeError when one could not train."""
    optimizer = loaded.recipe.optimizer
    for name, turn in optimizer.turns.items():
        _check(loaded, registry, ("optimizer", "turns", name), turn)
    if not optimizer.turns:
        _check(loaded, registry, ("optimizer",), optimizer)


def _check(loaded: LoadedRecipe, registry: Registry, path: KeyPath, component: Component) -> None:
    import torch

    name = component.use
    group = {"params": [torch.nn.Parameter(torch.zeros(2, 2))]}
    try:
        optimizer = registry.build("optimizer", component, params=[group])
    except NotImported:
        raise
    except PluginError as error:
        problem = loaded.problem(path, error.message, *error.hints)
        raise RecipeError([problem]) from error

    if not isinstance(optimizer, torch.optim.Optimizer):
        message = f'optimizer "{name}" makes a {type(optimizer).__name__}, not a torch.optim.Optimizer'
        raise RecipeError([loaded.problem((*path, "use"), message)])
    if _needs_closure(optimizer):
        message = f'optimizer "{name}" computes the loss itself, several times a step, which ddpforge does not do'
        raise RecipeError([loaded.problem((*path, "use"), message, "use a first-order optimizer")])
    settings: Any
    for settings in optimizer.param_groups:
        if "lr" in settings and not settings["lr"] > 0:
            message = f"`{dotted(path)}.lr` must be more than 0, not {float(settings['lr'])}"
            raise RecipeError([loaded.problem((*path, "lr"), message)])


def _needs_closure(optimizer: Optimizer) -> bool:
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(parameter.default is parameter.empty for parameter in parameters[:1])
