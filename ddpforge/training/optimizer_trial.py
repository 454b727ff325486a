"""Tries out what only the optimizer itself can tell: whether it takes its options. Needs torch."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ddpforge.components.registry import NotImported
from ddpforge.errors import PluginError, RecipeError

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ddpforge.components.registry import Registry
    from ddpforge.recipe.load import LoadedRecipe


def check_optimizer(loaded: LoadedRecipe, registry: Registry) -> None:
    """Builds the recipe's optimizer over one small parameter; raises RecipeError when it could not train."""
    import torch

    name = loaded.recipe.optimizer.use
    group = {"params": [torch.nn.Parameter(torch.zeros(2, 2))]}
    try:
        optimizer = registry.build("optimizer", loaded.recipe.optimizer, params=[group])
    except NotImported:
        raise
    except PluginError as error:
        problem = loaded.problem(("optimizer",), error.message, *error.hints)
        raise RecipeError([problem]) from error

    if not isinstance(optimizer, torch.optim.Optimizer):
        message = f'optimizer "{name}" makes a {type(optimizer).__name__}, not a torch.optim.Optimizer'
        raise RecipeError([loaded.problem(("optimizer", "use"), message)])
    if _needs_closure(optimizer):
        message = f'optimizer "{name}" computes the loss itself, several times a step, which ddpforge does not do'
        raise RecipeError([loaded.problem(("optimizer", "use"), message, "use a first-order optimizer")])
    settings: Any
    for settings in optimizer.param_groups:
        if "lr" in settings and not settings["lr"] > 0:
            message = f"`optimizer.lr` must be more than 0, not {float(settings['lr'])}"
            raise RecipeError([loaded.problem(("optimizer", "lr"), message)])


def _needs_closure(optimizer: Optimizer) -> bool:
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(parameter.default is parameter.empty for parameter in parameters[:1])
