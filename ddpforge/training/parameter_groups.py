"""Chooses the parameters that an optimizer or an update trains, and those of them without weight decay."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from types import MethodType
from typing import Any

from torch import nn

from ddpforge import compat

__all__ = [
    "freeze",
    "freeze_batchnorm_statistics",
    "layerwise_lr_groups",
    "local_groups",
    "match_parameters",
    "parameter_groups",
    "parameters_by_group",
    "parameters_by_update",
    "selected",
]

_Test = Callable[[str, nn.Module, nn.Parameter], bool]


def parameter_groups(
    model: nn.Module, no_decay: Sequence[str], among: Collection[str] | None = None
) -> list[dict[str, Any]]:
    """Returns the trainable parameters in two groups: with weight decay, and with `weight_decay` 0.

    `among` are the names to choose from, by default all.

    Each group has the keys `params` and `names`, in the model's order. An empty group is skipped. A tied parameter
    appears once, under its first name; it has no weight decay if `no_decay` covers any of its names or owners.

    `no_decay` holds globs over parameter names (`*` matches dots too) and these words:

    - "bias": the last part of the name is the word bias or contains it, like `in_proj_bias` and `bias_ih_l0`;
    - "norm": owned by a normalization layer: its class, or a base class, is named `…Norm` or `…Norm2d`;
    - "embedding": owned by an `nn.Embedding` or `nn.EmbeddingBag`;
    - "1d": has one dimension, or none; "2d": has two.

    Raises ValueError if nothing is trainable, or if a glob matches no parameter, trainable or not.
    """
    trainable = _trainable(model)
    if among is not None:
        trainable = {name: parameter for name, parameter in trainable.items() if name in among}

    exempt = {id(parameter) for pattern in no_decay for parameter in match_parameters(model, pattern, "no_decay")}
    decayed = {name: parameter for name, parameter in trainable.items() if id(parameter) not in exempt}
    others = {name: parameter for name, parameter in trainable.items() if id(parameter) in exempt}

    groups = [_group(decayed), _group(others) | {"weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def local_groups(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the groups without the parameters that only other ranks hold, which are on the meta device here.

    A group may become empty, but it stays in the list: group numbers are the same on all ranks.
    """
    found = []
    for group in groups:
        mine = [(name, one) for name, one in zip(group["names"], group["params"], strict=True) if not one.is_meta]
        found.append(group | {"params": [one for _, one in mine], "names": [name for name, _ in mine]})
    return found


def layerwise_lr_groups(
    groups: Sequence[dict[str, Any]], model: nn.Module, blocks: Sequence[nn.Module], decay: float
) -> list[dict[str, Any]]:
    """Splits groups by layer, the last layer first; the `scale` of each is `decay` ** (number of later layers).

    Layers are the parameters before the first block, each of the `blocks` in the model's order, and the parameters
    after the last block. Parameters between two blocks belong to the first one. As in BEiT (Bao et al., 2022).
    """
    layers = _layers(model, blocks)
    found = []
    for layer in range(len(blocks) + 1, -1, -1):
        for group in groups:
            mine = [
                (name, one) for name, one in zip(group["names"], group["params"], strict=True) if layers[name] == layer
            ]
            if mine:
                names, params = zip(*mine, strict=True)
                scale = decay ** (len(blocks) + 1 - layer)
                found.append(group | {"params": list(params), "names": list(names), "scale": scale})
    return found


def _layers(model: nn.Module, blocks: Sequence[nn.Module]) -> dict[str, int]:
    """Returns the layer number of each parameter by name; 0 is before the first block."""
    starts = {id(parameter): number for number, block in enumerate(blocks, 1) for parameter in block.parameters()}
    found, layer, last = {}, 0, len(blocks)
    for name, parameter in model.named_parameters():
        inside = starts.get(id(parameter))
        layer = inside if inside is not None else last + 1 if layer >= last else layer
        found[name] = layer
    return found


def parameters_by_update(model: nn.Module, updates: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the names of the trainable parameters of each update; entries of `updates` are like those of `no_decay`.

    Raises ValueError unless each parameter is in exactly one update, each update has one, and each glob matches one.
    """
    owners = _owners(model, "updates", updates)
    for name, those in owners.items():
        if not those:
            raise ValueError(f"updates: parameter `{name}` is in no update; add it to the `parameters` of one update")
    return {update: [name for name, those in owners.items() if update in those] for update in updates}


def parameters_by_group(model: nn.Module, groups: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the names of the trainable parameters of each group, and first, as "", of those in no group.

    Raises ValueError if a parameter is in two groups, a group has none, or a glob matches none.
    """
    owners = _owners(model, "groups", groups)
    rest = {"": [name for name, those in owners.items() if not those]}
    return rest | {group: [name for name, those in owners.items() if group in those] for group in groups}


def _owners(model: nn.Module, table: str, tables: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns the inner tables of [optimizer] that each trainable parameter is in; raises ValueError if several."""
    trainable = {id(parameter): name for name, parameter in _trainable(model).items()}
    owners: dict[str, list[str]] = {name: [] for name in trainable.values()}
    for one, entries in tables.items():
        key = f"optimizer.{table}.{one}.parameters"
        mine = selected(model, entries, key)
        if not mine & trainable.keys():
            raise ValueError(f"{key}: it has no trainable parameter")
        for name in (name for parameter, name in trainable.items() if parameter in mine):
            owners[name].append(one)
            if len(owners[name]) > 1:
                raise ValueError(
                    f"{table}: parameter `{name}` is in the {table} {' and '.join(owners[name])}, but can be in only "
                    'one; an entry "!GLOB" of `parameters` excludes parameters again'
                )
    return owners


def selected(model: nn.Module, entries: Sequence[str], key: str, *, words: bool = True) -> set[int]:
    """Returns the ids of the parameters that the entries select, in order; an entry with "!" excludes its matches."""
    found: set[int] = set()
    for entry in entries:
        meant = {id(parameter) for parameter in match_parameters(model, entry.removeprefix("!"), key, words=words)}
        found = found - meant if entry.startswith("!") else found | meant
    return found


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise ValueError("the model has no trainable parameters: it has no parameters, or all of them are frozen")
    return found


def _group(parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    return {"params": list(parameters.values()), "names": list(parameters)}


def match_parameters(model: nn.Module, pattern: str, key: str, *, words: bool = True) -> list[nn.Parameter]:
    """Returns the parameters that an entry of `key` selects: a glob over full names or, if `words`, a word."""
    known = _WORDS if words else {}
    test = known.get(pattern) or (lambda name, owner, parameter: fnmatchcase(name, pattern))
    owned = [  # every name of every parameter, with the module that holds it under that name
        (name, module, parameter)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False)
    ]
    found = [parameter for name, owner, parameter in owned if test(name, owner, parameter)]

    if not found and pattern not in known:
        near = get_close_matches(pattern, [*known, *(name for name, *_ in owned)], n=3, cutoff=0)
        raise ValueError(f"{key}: `{pattern}` matches no parameter; similar names: {', '.join(near)}")
    return found


def _is_bias(name: str, owner: nn.Module, parameter: nn.Parameter) -> bool:
    return re.fullmatch(r"(.*_)?bias(_.*)?", name.rpartition(".")[2]) is not None


def _is_of_norm(name: str, owner: nn.Module, parameter: nn.Parameter) -> bool:
    return any(re.search(r"Norm([123]d)?$", base.__name__) for base in type(owner).__mro__)


_WORDS: Mapping[str, _Test] = {
    "bias": _is_bias,
    "norm": _is_of_norm,
    "embedding": lambda name, owner, parameter: isinstance(owner, nn.Embedding | nn.EmbeddingBag),
    "1d": lambda name, owner, parameter: parameter.ndim <= 1,
    "2d": lambda name, owner, parameter: parameter.ndim == 2,
}


def freeze(model: nn.Module, globs: Sequence[str]) -> None:
    """Freezes the parameters that globs match; `*` matches dots too, and a glob with "!" excludes parameters again.

    Raises ValueError for a glob without a match, and for a first glob with "!".
    """
    if globs and globs[0].startswith("!"):
        raise ValueError(
            f'train.freeze: "{globs[0]}" is the first entry, and excludes nothing; to freeze all others: '
            f'["*", "{globs[0]}"]'
        )
    frozen = selected(model, globs, "train.freeze", words=False)
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)


def freeze_batchnorm_statistics(model: nn.Module, globs: Sequence[str]) -> None:
    """Keeps each BatchNorm in evaluation mode during training, if the globs match all of its parameters.

    It normalizes with its running statistics, which do not change.
    """
    for prefix, module in model.named_modules():
        names = [name for name, _ in module.named_parameters(prefix, recurse=False)]
        if isinstance(module, compat.batch_norms()) and names and all(_is_named(name, globs) for name in names):
            module.eval()
            module.train = MethodType(_stay, module)  # type: ignore[method-assign]


def _is_named(name: str, globs: Sequence[str]) -> bool:
    meant = [glob for glob in globs if fnmatchcase(name, glob.removeprefix("!"))]
    return bool(meant) and not meant[-1].startswith("!")


def _stay(module: nn.Module, mode: bool = True) -> nn.Module:
    return module
