"""The contents of a checkpoint, flattened into tensors and JSON, and unflattened again."""

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
from ddpforge.checkpoint.schema import CallbackScalars, Manifest, OptimizerScalars, Scalar, Section
from ddpforge.checkpoint.write_shares import divide
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.interfaces.regions import Part

X = TypeVar("X")

Parts = Part | Sequence[Part]
Plain = bool | int | float | str | None
Held = dict[Section, dict[str, list[Part]]]

SHARED = ""  # owns, among the parameters' optimizer state, what belongs to no parameter: none can have this name


@dataclass(kw_only=True)
class Facts:
    """A checkpoint's facts about its run, beside the state of the model, of the optimizer and of callbacks.

    `position` (in the data) and `loop` (loss scale, skipped steps) are JSON. `recipe` is the resolved recipe's text;
    `lineage` tells which recipes led here. `run` is the run's id, `data` has the fingerprints of its datasets, and
    `rows` are those that its metrics.jsonl had; earlier versions wrote none of these.
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
    """One rank's contribution to a checkpoint, by the names that `CanonicalState` has.

    A `Part` (or several, of one tensor) is what this rank holds: all ranks' parts must make up the tensor. Where
    several ranks hold the same elements (`replicas`), they share the work of writing them, and so they do with a
    tensor, which every rank holds alike; all replicas must have the same names. Numbers that several ranks have must
    be the same. Names that other ranks have may be missing here.
    """

    model: Mapping[str, Tensor | Parts]
    optimizer: Mapping[str, Mapping[str, Tensor | Parts | int | float | bool | None]] = field(default_factory=dict)
    callbacks: Mapping[str, Mapping[str, Tensor | Parts | Plain]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        state: CanonicalState[Tensor | Part],
        callbacks: Mapping[str, Mapping[str, Tensor | Part | Plain]] = MappingProxyType({}),
    ) -> "RankState":
        """A contribution made of a replica's state and that of callbacks."""
        optimizer = {**state.optimizer, SHARED: state.shared} if state.shared else state.optimizer
        return cls(model=state.model, optimizer=optimizer, callbacks=callbacks, aliases=state.aliases)


class Flat(NamedTuple):
    """A rank's state, flattened: what it holds of tensors by section and "<owner>/<key>", and what else is there."""

    held: Held
    optimizer: OptimizerScalars
    callbacks: CallbackScalars


class Kind(NamedTuple):
    """The peculiarities of the optimizer's state, or of that of callbacks."""

    what: str  # names a value in an error
    numbers: bool  # 0-d tensors are kept as numbers in the manifest
    plain: tuple[type, ...]  # types that may stand beside tensors
    cut: Callable[[str, str], tuple[str, str, str]]  # a tensor's name into owner, slash and key


# A parameter's name may hold slashes, the keys of its state do not; for callbacks it is the other way round.
OPTIMIZER = Kind("{1} in the optimizer state of {0}", True, (bool, int, float, NoneType), str.rpartition)
CALLBACKS = Kind("{1} in the state of callback {0}", False, (bool, int, float, str, NoneType), str.partition)


# ---------------------------------------------------------------------------------------------- flat
def flatten(state: RankState, *, rank: int, ranks: int) -> Flat:
    """Flattens a rank's state; raises CheckpointError naming whatever cannot be saved."""
    mine = partial(_held, rank=rank, ranks=ranks)
    model: dict[str, list[Part]] = {}
    for name, value in state.model.items():
        if (held := mine(value, f"{name} of the model")) is None:
            raise CheckpointError(f"{name} of the model cannot be saved: it is a {type(value).__name__}")
        model[name] = held
    optimizer, optimizer_scalars = _split(state.optimizer, OPTIMIZER, mine)
    callbacks, callback_scalars = _split(state.callbacks, CALLBACKS, mine)
    return Flat(
        {"model": model, "optimizer": optimizer, "callbacks": callbacks},
        cast(OptimizerScalars, optimizer_scalars),
        callback_scalars,
    )


def _held(value: object, what: str, *, rank: int, ranks: int) -> list[Part] | None:
    """The parts that `value` stands for; None if it is no tensor. Raises CheckpointError if it cannot be saved."""
    if isinstance(value, Tensor):
        safetensors_writer.check(value, what)
        return [Part.whole(value, replica=rank, replicas=ranks)]
    parts = [value] if isinstance(value, Part) else value
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, Part) for part in parts):
        return None

    found: list[Part] = [simple for part in parts for simple in part.simple()]
    for part in found:
        safetensors_writer.check(part.tensor, what)
        if (part.shape, part.tensor.dtype) != (found[0].shape, found[0].tensor.dtype):
            raise CheckpointError(f"{what} cannot be saved: its parts are of different tensors")
    return found


def _split(
    owners: Mapping[str, Mapping[str, object]], kind: Kind, mine: Callable[[object, str], list[Part] | None]
) -> tuple[dict[str, list[Part]], dict[str, dict[str, Scalar]]]:
    """Tensors by "<owner>/<key>", and the rest, which names every owner, even one that has nothing there."""
    found: dict[str, list[Part]] = {}
    rest: dict[str, dict[str, Scalar]] = {owner: {} for owner in owners}
    numbers = _on_host(x for values in owners.values() for x in values.values()) if kind.numbers else {}
    for owner, values in owners.items():
        for key, value in values.items():
            what = kind.what.format(owner, key)
            held = None if isinstance(value, Tensor) and kind.numbers and not value.ndim else mine(value, what)
            if held is None:
                rest[owner][key] = safetensors_writer.to_scalar(numbers.get(id(value), value), what, kind.plain)
                continue
            found[name := f"{owner}/{key}"] = held
            if kind.cut(name, "/") != (owner, "/", key):
                raise CheckpointError(f"{what} cannot be saved: its name must not hold a slash")
    return found, rest


def _on_host(values: Iterable[object]) -> dict[int, Tensor]:
    """The 0-d tensors that are on a device, by their ids, in one copy for each kind: a fused Adam has one a weight."""
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for x in values:
        if type(x) is Tensor and not x.ndim and _is_away(x):
            kinds[x.device, x.dtype].append(x)
    return {id(x): number for same in kinds.values() for x, number in zip(same, torch.stack(same).cpu(), strict=True)}


def _is_away(tensor: Tensor) -> bool:
    return tensor.device.type not in ("cpu", "meta")


def own_part(held: Held) -> Held:
    """This rank's part of the writing: its own parts, and its share of those that several ranks hold alike."""
    alike: dict[tuple[int, int, str], dict[tuple[Section, str, int], Part]] = defaultdict(dict)
    for section, found in held.items():
        for name, parts in found.items():
            for number, part in enumerate(parts):
                alike[part.replica, part.replicas, part.among][section, name, number] = part

    mine = {
        key: pieces
        for (replica, replicas, _), parts_alike in alike.items()
        for key, pieces in divide(parts_alike, rank=replica, ranks=replicas).items()
    }
    return {
        section: {
            name: [piece for number in range(len(parts)) for piece in mine[section, name, number]]
            for name, parts in found.items()
        }
        for section, found in held.items()
    }


# ---------------------------------------------------------------------------------------------- and back
def unflatten(
    rest: Mapping[str, Mapping[str, Scalar]], found: Mapping[str, X], kind: Kind
) -> dict[str, dict[str, X | safetensors_writer.Value]]:
    """The inverse of `flatten`; raises ValueError or KeyError for what `flatten` cannot have made."""
    owners: dict[str, dict[str, X | safetensors_writer.Value]] = {
        owner: {key: safetensors_writer.from_scalar(x) for key, x in values.items()} for owner, values in rest.items()
    }
    for name, tensor in found.items():
        owner, _, key = kind.cut(name, "/")
        owners[owner][key] = tensor
    return owners


def facts_of(manifest: Manifest) -> Facts:
    """The facts about the run in a manifest."""
    return Facts(
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
