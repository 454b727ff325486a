"""Chooses the parameters that an optimizer, or a turn, trains, and those of them that it does not decay."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

__all__ = ["covered", "parameter_groups", "parameters_of_turns"]

_Test = Callable[[str, nn.Module, nn.Parameter], bool]


def parameter_groups(
    model: nn.Module, no_decay: Sequence[str], among: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """The trainable parameters, in the model's order: those to decay, then those with `weight_decay` 0.

    `among` are names to choose from, by default all.

    A group without parameters is left out. Beside `params` each has their `names`. A tied parameter appears
    once, under the first of its names, and is not decayed if `no_decay` covers any of its names or owners.

    `no_decay` holds globs over parameter names (`*` matches dots too) and these words:

    - "bias": the last part of the name is the word bias or contains it, like `in_proj_bias` and `bias_ih_l0`;
    - "norm": owned by a normalisation layer: its class, or a base of it, is called `…Norm` or `…Norm2d`;
    - "embedding": owned by an `nn.Embedding` or `nn.EmbeddingBag`;
    - "1d": has one dimension, or none.

    Raises ValueError when nothing is trainable, and when a glob matches no parameter, trainable or not.
    """
    trainable = _trainable(model)
    if among is not None:
        trainable = {name: parameter for name, parameter in trainable.items() if name in among}

    exempt = {id(parameter) for pattern in no_decay for parameter in covered(model, pattern)}
    decayed = {name: parameter for name, parameter in trainable.items() if id(parameter) not in exempt}
    others = {name: parameter for name, parameter in trainable.items() if id(parameter) in exempt}

    groups = [_group(decayed), _group(others) | {"weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def parameters_of_turns(model: nn.Module, turns: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """The names of the trainable parameters of each turn, given as globs.

    Raises ValueError unless each parameter is one turn's, each turn has one, and each glob matches one.
    """
    trainable = {id(parameter): name for name, parameter in _trainable(model).items()}
    owners: dict[str, list[str]] = {name: [] for name in trainable.values()}
    for turn, globs in turns.items():
        key = f"optimizer.turns.{turn}.parameters"
        mine = {id(parameter) for glob in globs for parameter in covered(model, glob, key, {})}
        for name in (name for one, name in trainable.items() if one in mine):
            owners[name].append(turn)
        if not mine & trainable.keys():
            raise ValueError(f"{key}: all parameters of the turn `{turn}` are frozen")

    for name, those in owners.items():
        if len(those) != 1:
            what = f"in the turns {' and '.join(those)}" if those else "in no turn"
            raise ValueError(f"turns: parameter `{name}` is {what}, and must be in one; see their `parameters`")
    return {turn: [name for name, (owner,) in owners.items() if owner == turn] for turn in turns}


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError("the model has no trainable parameters: it has none at all, or all of them are frozen")
    return found


def _group(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {"params": list(parameters.values()), "names": list(parameters)}


def covered(
    model: nn.Module, pattern: str, key: str = "no_decay", words: Mapping[str, _Test] | None = None
) -> list[nn.Parameter]:
    """The parameters that one entry of a key means: a glob, or one of `words`, by default those of `no_decay`."""
    known = _WORDS if words is None else words
    test = known.get(pattern) or (lambda name, owner, parameter: fnmatchcase(name, pattern))
    owned = list(_owned(model))
    covered = [parameter for name, owner, parameter in owned if test(name, owner, parameter)]

    if not covered and pattern not in known:
        near = get_close_matches(pattern, [*known, *(name for name, *_ in owned)], n=3, cutoff=0)
        raise ValueError(f"{key}: `{pattern}` matches no parameter; near it are {', '.join(near)}")
    return covered


def _owned(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Every name of every parameter, with the module that holds it under that name."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            yield name, module, parameter


def _is_bias(name: str, owner: nn.Module, parameter: nn.Parameter) -> bool:
    return re.fullmatch(r"(.*_)?bias(_.*)?", name.rpartition(".")[2]) is not None


def _is_of_norm(name: str, owner: nn.Module, parameter: nn.Parameter) -> bool:
    return any(re.search(r"Norm([123]d)?$", base.__name__) for base in type(owner).__mro__)


_WORDS: Mapping[str, _Test] = {
    "bias": _is_bias,
    "norm": _is_of_norm,
    "embedding": lambda name, owner, parameter: isinstance(owner, nn.Embedding | nn.EmbeddingBag),
    "1d": lambda name, owner, parameter: parameter.ndim <= 1,
}
