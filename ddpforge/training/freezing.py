"""Freezes the parameters, and statistics of BatchNorm, that a recipe names in `train.freeze`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import MethodType

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddpforge.training.parameter_groups import selected

__all__ = ["freeze", "hold_statistics"]


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Freezes the parameters that globs name, `*` matching dots too; one with "!" takes parameters out again.

    Raises ValueError for a glob that names none, and for a first one with "!".
    """
    if globs and globs[0].startswith("!"):
        raise ValueError(f'train.freeze: "{globs[0]}" takes out of nothing; freeze all but these: ["*", "{globs[0]}"]')
    frozen = selected(model, globs, "train.freeze", words=False)
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)


def hold_statistics(model: nn.Module, globs: Sequence[str]) -> None:
    """Lets every BatchNorm whose parameters the globs all name stay in evaluation mode, in training too.

    It normalises by the statistics that it has, and they stay what they are.
    """
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(prefix, recurse=False)]
        if isinstance(module, _BatchNorm) and names and all(_is_named(name, globs) for name in names):
            module.eval()
            module.train = MethodType(_stay, module)  # type: ignore[method-assign]


def _is_named(name: str, globs: Sequence[str]) -> bool:
    meant = [glob for glob in globs if fnmatchcase(name, glob.removeprefix("!"))]
    return bool(meant) and not meant[-1].startswith("!")


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
