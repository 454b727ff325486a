"""Frozen weights in checkpoints: omitted if every start loads them from elsewhere, and read in any dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ddpforge.checkpoint.schema import OMITTED, omits_weights
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Ranks, Region, Replica, SavedTensor, TensorShard, in_float64
from ddpforge.training.features import Assembled, Feature

__all__ = [
    "FrozenWeights",
    "OmittedWeights",
    "checksum",
    "checksums_match",
    "convert_frozen",
    "fill_frozen",
    "verify_frozen",
    "without_frozen",
    "without_state_of_frozen",
]


@torch.no_grad()
def checksum(held: Mapping[str, Tensor | TensorShard], ranks: Ranks) -> dict[str, float]:
    """Returns checksums of the weights over `ranks`, the same under every strategy. Collective; waits for the device.

    A plain tensor must be the same on every rank.
    """
    sums = torch.zeros(2, dtype=torch.float64)
    for each in held.values():
        part = each if isinstance(each, TensorShard) else TensorShard.whole(each, replicas=ranks.size)
        values = in_float64(part.tensor).abs()
        sums += torch.stack([values.sum(), values.square().sum()]).cpu() / part.replicas
    magnitude, squares = ranks.all_reduce_sum(sums).tolist()
    return {"magnitude": magnitude, "squares": squares}


def checksums_match(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """True if two results of `checksum` are of the same weights; they may differ by the order of summation."""
    return one.keys() == other.keys() and all(
        isclose(one[key], value, rel_tol=1e-9, abs_tol=1e-12) for key, value in other.items()
    )


class FrozenWeights(Feature):
    """Frozen weights of a checkpoint, converted to the dtypes of the model's, and filled in if it omits them."""

    def __init__(self, replica: Replica, ranks: Ranks) -> None:
        self._replica, self._ranks = replica, ranks

    @classmethod
    def of(cls, run: Assembled) -> FrozenWeights:
        """Returns the feature; checkpoints of the run omit frozen weights if `checkpoint.save` is "trainable"."""
        omits = run.parts.recipe.checkpoint.save == "trainable"
        return (OmittedWeights if omits else FrozenWeights)(run.replica, run.world.global_ranks)

    @override
    def loaded_state(self, state: CanonicalState[SavedTensor]) -> CanonicalState[SavedTensor]:
        state = convert_frozen(without_state_of_frozen(state, self._replica), self._replica)
        return fill_frozen(state, self._replica, self._ranks)


class OmittedWeights(FrozenWeights):
    """Frozen weights that checkpoints omit."""

    def __init__(self, replica: Replica, ranks: Ranks) -> None:
        super().__init__(replica, ranks)
        self._omitted: Mapping[str, Any] = {}  # checksums, as the first checkpoint has them

    def saved_state(self, state: CanonicalState[Tensor | TensorShard]) -> CanonicalState[Any]:
        """Returns the state without frozen weights; raises CheckpointError if they have changed during the run."""
        state = without_frozen(state, self._replica, self._ranks)
        now = {name: x for name, x in state.scalars.items() if omits_weights([name])}
        if self._omitted and not checksums_match(now, self._omitted):
            raise CheckpointError(
                "frozen weights have changed during the run, and checkpoints omit them",
                hints=['set checkpoint.save = "all"'],
            )
        self._omitted = now
        return state


# ---------------------------------------------------------------------------------------------- of the model
def without_frozen(state: CanonicalState[Tensor | TensorShard], replica: Replica, ranks: Ranks) -> CanonicalState[Any]:
    """Returns the state without the frozen weights, and with their checksums."""
    frozen = replica.weights.frozen()
    model = {name: held for name, held in state.model.items() if name not in frozen}
    aliases = {alias: name for alias, name in state.aliases.items() if name in model}
    sums = {f"{OMITTED}{key}": value for key, value in checksum(frozen, ranks).items()}
    return replace(state, model=model, aliases=aliases, scalars={**state.scalars, **sums})


def fill_frozen(state: CanonicalState[SavedTensor], replica: Replica, ranks: Ranks) -> CanonicalState[SavedTensor]:
    """Returns the state of a checkpoint, in which the omitted weights keep their current values.

    Raises CheckpointError if these are not the values that the run was trained with.
    """
    if not omits_weights(state.scalars):
        return state
    weights = {**replica.weights.frozen(), **replica.weights.shards()}  # `train.freeze` may have changed since
    absent = {name: part for name, part in weights.items() if name not in state.model}
    verify_frozen(state.scalars, absent, ranks)
    stay: dict[str, SavedTensor] = {name: _Stays(part.shape, part.tensor.dtype) for name, part in absent.items()}
    return replace(state, model={**stay, **state.model})


def convert_frozen(state: CanonicalState[SavedTensor], replica: Replica) -> CanonicalState[SavedTensor]:
    """Returns the state of a checkpoint with the dtypes of the model's weights; they are converted when they are read.

    `train.frozen_dtype` or `train.freeze` may have changed. Reading raises CheckpointError for a value that a weight
    with a smaller dtype cannot hold.
    """
    weights = {**replica.weights.frozen(), **replica.weights.shards()}
    converted: dict[str, SavedTensor] = {
        name: _Converted(name, saved, part.tensor.dtype)
        for name, part in weights.items()
        if (saved := state.model.get(name)) is not None and {saved.dtype, part.tensor.dtype} in _CONVERTIBLE
    }
    return replace(state, model={**state.model, **converted}) if converted else state


def without_state_of_frozen(state: CanonicalState[SavedTensor], replica: Replica) -> CanonicalState[SavedTensor]:
    """Returns the state of a checkpoint without the optimizer state of weights that are frozen now."""
    frozen = replica.weights.frozen()
    return replace(state, optimizer={name: one for name, one in state.optimizer.items() if name not in frozen})


def verify_frozen(numbers: Mapping[str, Any], absent: Mapping[str, Tensor | TensorShard], ranks: Ranks) -> None:
    """Raises CheckpointError unless `absent` are the weights that the checkpoint with these numbers omits."""
    known = {name.removeprefix(OMITTED): x for name, x in numbers.items() if name.startswith(OMITTED)}
    if not checksums_match(known, checksum(absent, ranks)):
        raise CheckpointError(
            "the checkpoint omits the frozen weights, and the frozen weights of the model differ from those of the "
            "training",
            hints=["load the original weights again, in the model's constructor or with checkpoint.init_from"],
        )


_CONVERTIBLE = ({torch.float32, torch.bfloat16}, {torch.float32, torch.float16})


@dataclass(frozen=True)
class _Converted:
    """Saved tensor that is converted without rounding when it is read."""

    name: str
    saved: SavedTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.saved.shape)

    def read(self) -> Tensor:
        """Returns the whole tensor; raises CheckpointError if it cannot be converted without rounding."""
        return self._convert(self.saved.read())

    def read_into(self, region: Region, target: Tensor) -> None:
        """Reads a region; raises CheckpointError if it cannot be converted without rounding."""
        raw = torch.empty_like(target, dtype=self.saved.dtype)
        self.saved.read_into(region, raw)
        target.detach().copy_(self._convert(raw))

    def _convert(self, raw: Tensor) -> Tensor:
        found = raw.to(self.dtype)
        if not torch.equal(found.to(raw.dtype), raw):
            now, then = (str(dtype).removeprefix("torch.") for dtype in (self.dtype, raw.dtype))
            raise CheckpointError(
                f"`{self.name}` is {now} and frozen, but the checkpoint has {then} values that {now} cannot hold",
                hints=['set train.frozen_dtype = "fp32"'],
            )
        return found


@dataclass(frozen=True)
class _Stays:
    """Tensor that keeps its value when a checkpoint is read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        raise NotImplementedError("a tensor that the checkpoint omits")

    def read_into(self, region: Region, target: Tensor) -> None:
        """Leaves `target`, the model's own tensor, as it is."""
