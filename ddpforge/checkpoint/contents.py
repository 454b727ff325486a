"""What goes into a checkpoint, taken apart into tensors and JSON, and put together again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import NamedTuple, cast

from pydantic import JsonValue
from torch import Tensor

from ddpforge.checkpoint import tensors
from ddpforge.checkpoint.regions import Part
from ddpforge.checkpoint.schema import CallbackScalars, Manifest, OptimizerScalars, Scalar, Section
from ddpforge.checkpoint.tensors import Value
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState

Parts = Part | Sequence[Part]
Plain = bool | int | float | str | None
OptimizerState = dict[str, dict[str, Tensor | int | float | bool | None]]


@dataclass(kw_only=True)
class Facts:
    """What a checkpoint says of a run beside the state of the model, of the optimizer and of callbacks.

    `position` (in the data) and `loop` (loss scale, skipped steps) are JSON. `recipe` is the resolved recipe's text;
    `lineage` tells which recipes led here.
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


@dataclass(kw_only=True)
class Checkpoint(Facts):
    """All that a run needs to go on as if it had never stopped. `callbacks` maps a callback's name to its state."""

    state: CanonicalState
    callbacks: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Share:
    """What one rank adds to a sharded checkpoint, by the names that `CanonicalState` has.

    A `Part` (or several, of one tensor) is this rank's own: all ranks' parts must make up the tensor. A tensor is one
    that every rank holds alike; the ranks share the work of writing it. Numbers that several ranks have must be the
    same. Names that other ranks have may be missing here.
    """

    model: Mapping[str, Tensor | Parts]
    optimizer: Mapping[str, Mapping[str, Tensor | Parts | int | float | bool | None]] = field(default_factory=dict)
    callbacks: Mapping[str, Mapping[str, Tensor | Parts | Plain]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Share":
        """The share of a rank that has everything."""
        state = checkpoint.state
        return cls(model=state.model, optimizer=state.optimizer, callbacks=checkpoint.callbacks, aliases=state.aliases)


class Apart(NamedTuple):
    """A share, taken apart: its tensors by section and "<owner>/<key>", and what else is there."""

    held: dict[Section, dict[str, Tensor | list[Part]]]
    optimizer: OptimizerScalars
    callbacks: CallbackScalars


class Kind(NamedTuple):
    """What is peculiar to the optimizer's state and to that of callbacks."""

    what: str  # names a value in an error
    numbers: bool  # 0-d tensors are kept as numbers in the manifest
    plain: tuple[type, ...]  # types that may stand beside tensors
    cut: Callable[[str, str], tuple[str, str, str]]  # takes a tensor's name apart


# A parameter's name may hold slashes, the keys of its state do not; for callbacks it is the other way round.
OPTIMIZER = Kind("{1} in the optimizer state of {0}", True, (bool, int, float, NoneType), str.rpartition)
CALLBACKS = Kind("{1} in the state of callback {0}", False, (bool, int, float, str, NoneType), str.partition)


# ---------------------------------------------------------------------------------------------- apart
def take_apart(share: Share) -> Apart:
    """Finds all that can be wrong with a share; raises CheckpointError naming it."""
    model: dict[str, Tensor | list[Part]] = {}
    for name, value in share.model.items():
        if (held := _held(value, f"{name} of the model")) is None:
            raise CheckpointError(f"{name} of the model cannot be saved: it is a {type(value).__name__}")
        model[name] = held
    optimizer, optimizer_scalars = _split(share.optimizer, OPTIMIZER)
    callbacks, callback_scalars = _split(share.callbacks, CALLBACKS)
    return Apart(
        {"model": model, "optimizer": optimizer, "callbacks": callbacks},
        cast(OptimizerScalars, optimizer_scalars),
        callback_scalars,
    )


def _held(value: object, what: str) -> Tensor | list[Part] | None:
    """The value if it is a tensor that can be saved, or parts of one; None if it is neither."""
    if isinstance(value, Tensor):
        tensors.check(value, what)
        return value
    parts = [value] if isinstance(value, Part) else value
    if not isinstance(parts, list | tuple) or not parts or not all(isinstance(part, Part) for part in parts):
        return None

    found: list[Part] = list(parts)
    for part in found:
        tensors.check(part.tensor, what)
        if (part.shape, part.tensor.dtype) != (found[0].shape, found[0].tensor.dtype):
            raise CheckpointError(f"{what} cannot be saved: its parts are of different tensors")
    return found


def _split(
    owners: Mapping[str, Mapping[str, object]], kind: Kind
) -> tuple[dict[str, Tensor | list[Part]], dict[str, dict[str, Scalar]]]:
    """Tensors by "<owner>/<key>", and the rest, which names every owner, even one that has nothing there."""
    found: dict[str, Tensor | list[Part]] = {}
    rest: dict[str, dict[str, Scalar]] = {owner: {} for owner in owners}
    for owner, values in owners.items():
        for key, value in values.items():
            what = kind.what.format(owner, key)
            held = None if isinstance(value, Tensor) and kind.numbers and not value.ndim else _held(value, what)
            if held is None:
                rest[owner][key] = tensors.to_scalar(value, what, kind.plain)
                continue
            found[name := f"{owner}/{key}"] = held
            if kind.cut(name, "/") != (owner, "/", key):
                raise CheckpointError(f"{what} cannot be saved: its name must not hold a slash")
    return found, rest


# ---------------------------------------------------------------------------------------------- together
def put_together(
    rest: Mapping[str, Mapping[str, Scalar]], found: Mapping[str, Tensor] | None, kind: Kind
) -> dict[str, dict[str, Value]]:
    """The inverse of taking apart; raises ValueError or KeyError where nothing could have been taken apart so."""
    owners = {o: {key: tensors.from_scalar(x) for key, x in values.items()} for o, values in rest.items()}
    for name, tensor in (found or {}).items():
        owner, _, key = kind.cut(name, "/")
        owners[owner][key] = tensor
    return owners


def facts_of(manifest: Manifest) -> Facts:
    """What a manifest says of the run."""
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
    )
