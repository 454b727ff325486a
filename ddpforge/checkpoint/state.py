"""Flattens the contents of a checkpoint into tensors and JSON, and unflattens them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, NoneType
from typing import NamedTuple, TypeVar, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from ddpforge.checkpoint import safetensors_writer
from ddpforge.checkpoint.schema import CallbackScalars, Manifest, Number, OptimizerScalars, Scalar, Section
from ddpforge.checkpoint.write_balance import divide
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.interfaces.regions import TensorShard

X = TypeVar("X")

Parts = TensorShard | Sequence[TensorShard]
Plain = bool | int | float | str | None
Held = dict[Section, dict[str, list[TensorShard]]]

SHARED = ""  # owner of optimizer state that belongs to no parameter; no parameter can have this name


@dataclass(kw_only=True)
class CheckpointMetadata:
    """Facts about the run in a checkpoint: everything except the state of model, optimizer and callbacks.

    Args:
        position: position in the data, as JSON
        loop: loss scale and skipped steps, as JSON
        recipe: text of the resolved recipe
        lineage: the recipes of this run so far
        run: id of the run; "" in checkpoints of earlier versions
        data: fingerprints of the datasets; empty in checkpoints of earlier versions
        rows: number of rows of metrics.jsonl at this checkpoint; None in checkpoints of earlier versions
    """

    step: int
    samples: int
    strategy: str
    world_size: int
    recipe: str = ""
    lineage: list[JsonValue] = field(default_factory=list)
    position: dict[str, JsonValue] = field(default_factory=dict)
    loop: dict[str, JsonValue] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    run: str = ""
    data: dict[str, JsonValue] = field(default_factory=dict)
    rows: int | None = None


@dataclass(kw_only=True)
class RankState:
    """One rank's contribution to a checkpoint, under the names of `CanonicalState`.

    A `TensorShard`, or several parts of one tensor, are the elements that this rank holds. The parts of all ranks must
    make up the whole tensor. A plain tensor must be identical on every rank. Ranks that hold the same elements
    (`replicas`) divide the writing; all replicas must have the same names. A number must be equal on all ranks that
    have it. A rank may lack names that other ranks have.
    """

    model: Mapping[str, Tensor | Parts]
    optimizer: Mapping[str, Mapping[str, Tensor | Parts | int | float | bool | None]] = field(default_factory=dict)
    callbacks: Mapping[str, Mapping[str, Tensor | Parts | Plain]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        state: CanonicalState[Tensor | TensorShard],
        callbacks: Mapping[str, Mapping[str, Tensor | TensorShard | Plain]] = MappingProxyType({}),
    ) -> "RankState":
        """Builds the contribution from the state of a replica and of the callbacks."""
        optimizer = {**state.optimizer, SHARED: state.extra_state} if state.extra_state else state.optimizer
        return cls(model=state.model, optimizer=optimizer, callbacks=callbacks, aliases=state.aliases)


class FlatState(NamedTuple):
    """Flattened state of a rank: `held` has its parts of tensors by section and "<owner>/<key>"; the rest is JSON."""

    held: Held
    optimizer: OptimizerScalars
    callbacks: CallbackScalars


class StateKind(NamedTuple):
    """Rules for flattening the state of the optimizer, or of callbacks."""

    what: str  # template for the name of a value in an error
    numbers: bool  # True: 0-d tensors are stored as numbers in the manifest
    plain: tuple[type, ...]  # allowed types in addition to tensors
    cut: Callable[[str, str], tuple[str, str, str]]  # splits a tensor's name into owner, slash and key


# A parameter's name may contain slashes, the keys of its state do not. For callbacks it is the reverse.
MODEL = "{0} of the model"
OPTIMIZER = StateKind("{1} in the optimizer state of {0}", True, (bool, int, float, NoneType), str.rpartition)
CALLBACKS = StateKind("{1} in the state of callback {0}", False, (bool, int, float, str, NoneType), str.partition)


# ---------------------------------------------------------------------------------------------- flat
def flatten(state: RankState, *, rank: int, ranks: int) -> FlatState:
    """Flattens a rank's state; raises CheckpointError with the name of a value that cannot be saved."""
    mine = partial(_held, rank, ranks)
    model: dict[str, list[TensorShard]] = {}
    for name, value in state.model.items():
        if (held := mine(value, MODEL, name)) is None:
            raise CheckpointError(f"{name} of the model cannot be saved: it is a {type(value).__name__}")
        model[name] = held
    optimizer, optimizer_scalars = _split(state.optimizer, OPTIMIZER, mine)
    callbacks, callback_scalars = _split(state.callbacks, CALLBACKS, mine)
    return FlatState(
        {"model": model, "optimizer": optimizer, "callbacks": callbacks},
        cast(OptimizerScalars, optimizer_scalars),
        callback_scalars,
    )


def _held(rank: int, ranks: int, value: object, what: str, *names: str) -> list[TensorShard] | None:
    """Returns the parts of `value`; None if it is not a tensor.

    Raises CheckpointError if it cannot be saved; `what` is a template for its description, with `names`.
    """
    if isinstance(value, Tensor):
        if not safetensors_writer.is_savable(value):
            safetensors_writer.check(value, what.format(*names))
        return [TensorShard.whole(value, replica=rank, replicas=ranks)]
    parts = [value] if isinstance(value, TensorShard) else value
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, TensorShard) for part in parts):
        return None

    found: list[TensorShard] = [simple for part in parts for simple in part.as_boxes()]
    for part in found:
        if not safetensors_writer.is_savable(part.tensor):
            safetensors_writer.check(part.tensor, what.format(*names))
        if (part.shape, part.tensor.dtype) != (found[0].shape, found[0].tensor.dtype):
            differ = "its parts differ in dtype or in the shape of the tensor"
            raise CheckpointError(f"{what.format(*names)} cannot be saved: {differ}")
    return found


def _split(
    owners: Mapping[str, Mapping[str, object]], kind: StateKind, mine: Callable[..., list[TensorShard] | None]
) -> tuple[dict[str, list[TensorShard]], dict[str, dict[str, Scalar]]]:
    """Returns tensors by "<owner>/<key>", and other values by owner and key; the latter includes every owner."""
    found: dict[str, list[TensorShard]] = {}
    rest: dict[str, dict[str, Scalar]] = {owner: {} for owner in owners}
    numbers = _numbers(x for values in owners.values() for x in values.values()) if kind.numbers else {}
    for owner, values in owners.items():
        for key, value in values.items():
            if number := numbers.get(id(value)):
                rest[owner][key] = number
                continue
            single = isinstance(value, Tensor) and kind.numbers and not value.ndim
            if single or (held := mine(value, kind.what, owner, key)) is None:
                rest[owner][key] = safetensors_writer.to_scalar(value, kind.what.format(owner, key), kind.plain)
                continue
            found[name := f"{owner}/{key}"] = held
            if kind.cut(name, "/")[0] != owner:
                raise CheckpointError(f"{kind.what.format(owner, key)} cannot be saved: its name must not hold a slash")
    return found, rest


def _numbers(values: Iterable[object]) -> dict[int, Number]:
    """Returns the JSON forms of the 0-d tensors, by id, with one copy to the host for each device and dtype."""
    # Adam has one such tensor for each weight, mostly with the same value: single copies would be slow.
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for x in values:
        if type(x) is Tensor and not x.ndim and safetensors_writer.is_savable(x):
            kinds[x.device, x.dtype].append(x)
    found: dict[int, Number] = {}
    for (_, dtype), same in kinds.items():
        plain = torch.stack(same).tolist()
        # By text, because 0.0 and -0.0 are equal.
        known = {text: safetensors_writer.to_number(dtype, x) for text, x in {repr(x): x for x in plain}.items()}
        found |= {id(x): known[repr(number)] for x, number in zip(same, plain, strict=True)}
    return found


def local_shards(held: Held) -> Held:
    """Returns the parts that this rank writes: its own, and its share of parts that several ranks hold."""
    alike: dict[tuple[int, int, str], dict[tuple[Section, str, int], TensorShard]] = defaultdict(dict)
    for section, found in held.items():
        for name, parts in found.items():
            for number, part in enumerate(parts):
                if part.replicas > 1:
                    alike[part.replica, part.replicas, part.replica_group][section, name, number] = part

    mine = {
        key: pieces
        for (replica, replicas, _), parts_alike in alike.items()
        for key, pieces in divide(parts_alike, rank=replica, ranks=replicas).items()
    }
    return {
        section: {
            name: [piece for number, part in enumerate(parts) for piece in mine.get((section, name, number), (part,))]
            if mine
            else parts
            for name, parts in found.items()
        }
        for section, found in held.items()
    }


# ---------------------------------------------------------------------------------------------- and back
def unflatten(
    rest: Mapping[str, Mapping[str, Scalar]], found: Mapping[str, X], kind: StateKind
) -> dict[str, dict[str, X | safetensors_writer.Value]]:
    """Undoes `flatten`; raises ValueError or KeyError if `flatten` cannot have made the input."""
    owners: dict[str, dict[str, X | safetensors_writer.Value]] = {
        owner: {key: safetensors_writer.from_scalar(x) for key, x in values.items()} for owner, values in rest.items()
    }
    for name, tensor in found.items():
        owner, _, key = kind.cut(name, "/")
        owners[owner][key] = tensor
    return owners


def metadata_of(manifest: Manifest) -> CheckpointMetadata:
    """Returns the facts about the run in a manifest."""
    return CheckpointMetadata(
        step=manifest.step,
        samples=manifest.samples,
        strategy=manifest.strategy,
        world_size=manifest.world_size,
        recipe=manifest.recipe,
        lineage=manifest.lineage,
        position=manifest.position,
        loop=manifest.loop,
        metrics={name: manifest.metric(name) for name in manifest.metrics},
        run=manifest.run,
        data=manifest.data,
        rows=manifest.rows,
    )
