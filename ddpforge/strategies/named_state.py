"""State by parameter name, for strategies that keep the model and torch's optimizer in their own form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Region, SavedTensor, TensorShard, read_all
from ddpforge.strategies.composite_optimizer import member_optimizers

__all__ = ["capture", "match", "match_form", "restore", "tensors"]


def capture(model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | TensorShard]:
    """Returns the state of the bare `model` and of its `optimizer`; tensors are references, not copies."""
    names = _names(model)
    weights, aliases = tensors(model)
    # `OptimizerExtraState` captures entries that belong to no parameter.
    owned = {parameter: entry for parameter, entry in optimizer.state.items() if isinstance(parameter, Tensor)}
    state = {names[id(parameter)]: dict(entry) for parameter, entry in owned.items() if entry}
    return CanonicalState({name: tensor.detach() for name, tensor in weights.items()}, state, aliases)


def tensors(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns parameters and persistent buffers by their first name, and a map from each further name to the first."""
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
    part_of: Callable[[str, Tensor], TensorShard] = lambda name, tensor: TensorShard.whole(tensor),
    like: Callable[[Tensor, Tensor], Tensor] = lambda mine, parameter: mine,
) -> None:
    """Reads `state` into `model` and `optimizer` in place; the optimizer keeps the recipe's hyper-parameters.

    Optimizer state in the shape of its parameter is distributed over ranks like the parameter.

    Args:
        partial: Tensors that `state` lacks keep their values.
        part_of: Receives a name and a tensor; returns this rank's part of the tensor.
        like: Receives this rank's part and a parameter; returns a tensor that is distributed like the parameter.

    Raises:
        CheckpointError: Names, shapes or dtypes differ.
    """
    held, _ = tensors(model)
    match(set(held), set(state.model) - set(state.aliases), partial=partial)
    found = {name: part_of(name, tensor.detach()) for name, tensor in held.items() if name in state.model}
    for name, part in found.items():
        match_form(name, part.shape, held[name].dtype, state.model[name])
    read_all((state.model[name], part.region, part.tensor) for name, part in found.items())

    trained = {name for _, member in member_optimizers(optimizer) for name, _ in _indices(member, _names(model))}
    if unknown := sorted(set(state.optimizer) - trained):
        raise CheckpointError(f"the checkpoint holds optimizer state of `{unknown[0]}`, which is not trained here")
    if partial and not state.optimizer:
        return

    for _, member in member_optimizers(optimizer):
        # torch's loader moves each tensor to its parameter's device and converts `step` as the optimizer expects it.
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
    """Maps the `id` of each parameter to the first of its names."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _indices(optimizer: Optimizer, names: dict[int, str]) -> Iterator[tuple[str, int]]:
    """Yields each parameter's name and its index in the optimizer's state_dict, which counts through all groups."""
    parameters: list[Any] = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        yield names[id(parameter)], index


def match(expected: set[str], found: set[str], *, partial: bool = False) -> None:
    """Raises CheckpointError unless the model and the checkpoint have tensors of the same names.

    If `partial`, the checkpoint may lack names, but may have no others.
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
    """Raises CheckpointError unless the saved tensor has this shape and dtype."""
    if (tuple(saved.shape), saved.dtype) != (tuple(shape), dtype):
        forms = ((dtype, shape), (saved.dtype, saved.shape))
        here, there = (f"{kind} {list(extent)}".removeprefix("torch.") for kind, extent in forms)
        raise CheckpointError(f"`{name}` is {here} in the model and {there} in the checkpoint")
