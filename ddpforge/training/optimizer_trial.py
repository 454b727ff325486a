"""Tries out what only the optimizer itself can tell: whether it takes its options. Needs torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ddpforge.components.errors import NotImported
from ddpforge.errors import PluginError, RecipeError
from ddpforge.recipe.report import dotted
from ddpforge.recipe.schema import settings_of

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ddpforge.components.registry import Registry
    from ddpforge.recipe.load import LoadedRecipe
    from ddpforge.recipe.report import KeyPath
    from ddpforge.recipe.schema import Component


_OF_GROUPS = {"betas", "eps", "lr", "momentum", "ns_steps", "weight_decay"}  # ddpforge's own have them for each group


def check_optimizer(loaded: LoadedRecipe, registry: Registry) -> None:
    """Builds the recipe's optimizers over one small parameter; raises RecipeError when one could not train.

    Those of ddpforge's own whose signatures say all that they would refuse are not built.
    """
    optimizer = loaded.recipe.optimizer
    for name, turn in optimizer.turns.items():
        if not _is_sure(turn, registry):
            _try(loaded, registry, ("optimizer", "turns", name), turn)
    is_sure = bool(optimizer.turns) or _is_sure(optimizer, registry)
    tried = None if is_sure else _try(loaded, registry, ("optimizer",), optimizer)
    for name, group in optimizer.groups.items():
        path, settings = ("optimizer", "groups", name), settings_of(group, optimizer)
        if group.use != optimizer.use and not _is_sure(group, registry):
            _try(loaded, registry, path, group)
        elif group.use == optimizer.use and not (is_sure and settings.keys() <= _OF_GROUPS):
            tried = tried or _try(loaded, registry, ("optimizer",), optimizer)
            _check_settings(loaded, path, tried, settings)


def _is_sure(component: Component, registry: Registry) -> bool:
    """True for an optimizer of ddpforge's own, unless it is set to what it refuses although its signature does not."""
    entry, options = registry.find("optimizer", component.use), component.options
    is_own = entry is not None and entry.target.startswith("ddpforge.builtin.")
    return is_own and not (options.get("nesterov") and not options.get("momentum"))


def _check_settings(loaded: LoadedRecipe, path: KeyPath, optimizer: Optimizer, settings: Mapping[str, Any]) -> None:
    """Raises RecipeError for a setting of a group that `optimizer` has for all parameters alike."""
    for key, value in settings.items():
        if key not in optimizer.defaults or isinstance(value, str) != isinstance(optimizer.defaults[key], str):
            message = f"`{key}` of {type(optimizer).__name__} is the same for all of its parameters"
            hint = f"set optimizer.{key}, or give the group another `use`"
            raise RecipeError([loaded.problem((*path, key), message, hint)])


def _try(loaded: LoadedRecipe, registry: Registry, path: KeyPath, component: Component) -> Optimizer:
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
    return optimizer


def _needs_closure(optimizer: Optimizer) -> bool:
    _, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    return any(parameter.default is parameter.empty for parameter in parameters[:1])
