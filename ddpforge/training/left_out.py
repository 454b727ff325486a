"""Weights that checkpoints leave out, because they come from elsewhere at every start: told from others by sums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Part, Ranks, Region, Replica, SavedTensor

__all__ = ["complete", "has_left_out", "measure", "refuse_others", "same", "without_frozen", "without_state_of_frozen"]

_PREFIX = "left_out."  # of the numbers by which a checkpoint knows the weights that it does not hold


@torch.no_grad()
def measure(held: Mapping[str, Tensor | Part], ranks: Ranks) -> dict[str, float]:
    """Sums over `ranks` by which other weights would be noticed, whatever strategy spreads them; waits for the device.

    A tensor is one that every rank holds alike.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for each in held.values():
        part = each if isinstance(each, Part) else Part.whole(each, replicas=ranks.size)
        values = part.tensor.detach().double().abs()
        sums += torch.stack([values.sum(), values.square().sum()]).cpu() / part.replicas
    magnitude, squares = ranks.sum(sums).tolist()
    return {"magnitude": magnitude, "squares": squares}


def same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two measurements are of the same weights, which were added up in another order."""
    return one.keys() == other.keys() and all(
        isclose(one[key], value, rel_tol=1e-9, abs_tol=1e-12) for key, value in other.items()
    )


# ---------------------------------------------------------------------------------------------- of the model
def without_frozen(state: CanonicalState[Tensor | Part], replica: Replica, ranks: Ranks) -> CanonicalState[Any]:
    """The state less the weights that are not trained, and with what is to be remembered of them."""
    frozen = replica.weights.frozen()
    model = {name: held for name, held in state.model.items() if name not in frozen}
    aliases = {alias: name for alias, name in state.aliases.items() if name in model}
    sums = {f"{_PREFIX}{key}": value for key, value in measure(frozen, ranks).items()}
    return replace(state, model=model, aliases=aliases, numbers={**state.numbers, **sums})


def has_left_out(numbers: Iterable[str]) -> bool:
    """True if a checkpoint with these numbers has no weights that were not trained."""
    return any(name.startswith(_PREFIX) for name in numbers)


def complete(state: CanonicalState[SavedTensor], replica: Replica, ranks: Ranks) -> CanonicalState[SavedTensor]:
    """The state of a checkpoint, in which what it has left out stays as it is.

    Raises CheckpointError where that is not what the run was trained with.
    """
    if not has_left_out(state.numbers):
        return state
    weights = {**replica.weights.frozen(), **replica.weights.parts()}  # what is frozen now may have been trained then
    absent = {name: part for name, part in weights.items() if name not in state.model}
    refuse_others(state.numbers, absent, ranks)
    stay: dict[str, SavedTensor] = {name: _Stays(part.shape, part.tensor.dtype) for name, part in absent.items()}
    return replace(state, model={**stay, **state.model})


def without_state_of_frozen(state: CanonicalState[SavedTensor], replica: Replica) -> CanonicalState[SavedTensor]:
    """The state of a checkpoint less what its optimizer knew of weights that are not trained any more."""
    frozen = replica.weights.frozen()
    return replace(state, optimizer={name: one for name, one in state.optimizer.items() if name not in frozen})


def refuse_others(numbers: Mapping[str, Any], absent: Mapping[str, Tensor | Part], ranks: Ranks) -> None:
    """Raises CheckpointError unless `absent` is what the checkpoint with these numbers has left out."""
    known = {name.removeprefix(_PREFIX): x for name, x in numbers.items() if name.startswith(_PREFIX)}
    if not same(known, measure(absent, ranks)):
        raise CheckpointError(
            "the checkpoint has left out weights that are not trained, and the model's are not those that it was "
            "trained with",
            hints=["let the model, or checkpoint.init_from, give the weights that it gave then"],
        )


@dataclass(frozen=True)
class _Stays:
    """A tensor that reading leaves as it is."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        raise NotImplementedError("a tensor that a checkpoint has left out")

    def read_into(self, region: Region, target: Tensor) -> None:
        """`target` is the model's own."""
