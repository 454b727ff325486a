"""State by parameter name, for strategies under which the model and the optimizer keep their own form on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Part, Region, SavedTensor, read_all
from ddpforge.strategies.several import members

__all__ = ["capture", "match", "match_form", "restore", "tensors"]


def capture(model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
    """The state of the bare `model` and of its `optimizer`; tensors are references, not copies."""
    names = _names(model)
    weights, aliases = tensors(model)
    # What is not a parameter's is in `OwnState`.
    owned = {parameter: entry for parameter, entry in optimizer.state.items() if isinstance(parameter, Tensor)}
    state = {names[id(parameter)]: dict(entry) for parameter, entry in owned.items() if entry}
    return CanonicalState({name: tensor.detach() for name, tensor in weights.items()}, state, aliases)


def tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The model's parameters and persistent buffers, each under its first name, and that name for each other one."""
    names = _names(model)
    first: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise CheckpointError(
                f"`{name}` in the model's state_dict is a {type(tensor).__name__}, not a tensor",
                hints=["a checkpoint holds tensors only; keep other state in a buffer, or rebuild it from the recipe"],
            )
        if (known := names.get(id(tensor), name)) == name:
            first[name] = tensor
        else:
            aliases[name] = known
    return first, aliases


def restore(
    model: nn.Module,
    optimizer: Optimizer,
    state: CanonicalState[SavedTensor],
    *,
    partial: bool = False,
    part_of: Callable[[str, Tensor], Part] = lambda name, tensor: Part.whole(tensor),
    like: Callable[[Tensor, Tensor], Tensor] = lambda mine, parameter: mine,
) -> None:
    """Reads `state` into `model` and `optimizer` in place; the optimizer keeps the recipe's hyper-parameters.

    `part_of(name, tensor)` is what this rank holds of a tensor, and `like(mine, parameter)` makes of this rank's part a
    tensor that lies on the ranks as `parameter` does. A tensor of the optimizer's state that is shaped like its
    parameter lies as the parameter does. Where `partial`, tensors that `state` lacks stay as they are.
    """
    held, _ = tensors(model)
    match(set(held), set(state.model) - set(state.aliases), partial=partial)
    found = {name: part_of(name, tensor.detach()) for name, tensor in held.items() if name in state.model}
    for name, part in found.items():
        match_form(name, part.shape, held[name].dtype, state.model[name])
    read_all((state.model[name], part.region, part.tensor) for name, part in found.items())

    trained = {name for _, member in members(optimizer) for name, _ in _indices(member, _names(model))}
    if unknown := sorted(set(state.optimizer) - trained):
        raise CheckpointError(f"the checkpoint holds optimizer state of `{unknown[0]}`, which is not trained here")
    if partial and not state.optimizer:
        return

    for _, member in members(optimizer):
        # torch's own loader moves each tensor to its parameter's device and gives `step` the form the optimizer wants.
        packed = member.state_dict()
        entries: dict[int, dict[str, Any]] = {}
        reads: dict[tuple[int, str], tuple[SavedTensor, Region, Tensor]] = {}
        owners = {index: name for name, index in _indices(member, _names(model)) if name in state.optimizer}
        for index, name in owners.items():
            part = part_of(name, held[name].detach())
            entries[index] = dict(state.optimizer[name])
            for key, value in entries[index].items():
                if isinstance(value, Tensor) or not hasattr(value, "read_into"):
                    continue
                if tuple(value.shape) != part.shape:
                    entries[index][key] = value.read()
                else:
                    reads[index, key] = value, part.region, torch.empty_like(part.tensor, dtype=value.dtype)
        read_all(reads.values())
        for (index, key), (_, _, mine) in reads.items():
            entries[index][key] = like(mine, held[owners[index]])
        member.load_state_dict(packed | {"state": entries})


def _names(model: nn.Module) -> dict[int, str]:
    """Parameter identity → the first of its names."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _indices(optimizer: Optimizer, names: dict[int, str]) -> Iterator[tuple[str, int]]:
    """Name → number of the parameter in the optimizer's state_dict, which counts through the groups."""
    parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        yield names[id(parameter)], index


def match(expected: set[str], found: set[str], *, partial: bool = False) -> None:
    """Raises CheckpointError unless the names of a model's tensors are those in a checkpoint.

    Where `partial`, the checkpoint may lack some, but must not have others.
    """
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if unexpected or (missing and not partial):
        facts = [
            f"{what}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
            for what, names in (("missing from the checkpoint", missing), ("not in the model", unexpected))
            if names
        ]
        raise CheckpointError(f"the checkpoint is of another model ({'; '.join(facts)})")


def match_form(name: str, shape: Sequence[int], dtype: torch.dtype, saved: SavedTensor) -> None:
    """Raises CheckpointError unless what was saved of a tensor has its shape and dtype."""
    if (tuple(saved.shape), saved.dtype) != (tuple(shape), dtype):
        forms = ((dtype, shape), (saved.dtype, saved.shape))
        here, there = (f"{kind} {list(extent)}".removeprefix("torch.") for kind, extent in forms)
        raise CheckpointError(f"`{name}` is {here} in the model and {there} in the checkpoint")
