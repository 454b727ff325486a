"""Finds the differences between two checkpoints, tensor by tensor."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from ddpforge.api import Change, CheckpointReader, recipe_changes
from ddpforge.checkpoint.schema import SECTIONS, Manifest, Section
from ddpforge.errors import CheckpointError
from ddpforge.recipe.upgrade import upgrade_tables
from ddpforge.runs.checkpoints import metrics, plain

_STRIDE = 1 << 22  # elements compared at a time, in float64
_TINY = 5e-324  # the smallest float64: no division by zero


@dataclass(frozen=True, kw_only=True)
class TensorDifference:
    """Difference of one tensor: in dtype or shape (`note`), or in values.

    `elements` is the number of elements that differ. `absolute` is the largest |a - b| of its elements, `relative` the
    largest |a - b| / max(|a|, |b|). Both are NaN if an element is NaN on one side only. If an infinite element
    differs, `absolute` is infinite and `relative` is NaN.
    """

    section: Section
    name: str
    note: str = ""
    elements: int = 0
    absolute: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Value:
    """Difference outside tensors; `a` or `b` is None if that side lacks the entry."""

    name: str
    a: Any
    b: Any


@dataclass(kw_only=True)
class Differences:
    """All differences between two checkpoints.

    `facts` are differences in the position of the runs, in tied names and in state outside tensors. `about` are
    differences in creation time, strategy, world size, versions and metrics. They do not affect how a run continues.
    """

    recipe: list[Change] = field(default_factory=list)
    facts: list[Value] = field(default_factory=list)
    about: list[Value] = field(default_factory=list)
    missing: dict[Section, list[str]] = field(default_factory=dict)  # in a, not in b
    unexpected: dict[Section, list[str]] = field(default_factory=dict)  # in b, not in a
    tensors: list[TensorDifference] = field(default_factory=list)
    compared: dict[Section, int] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """True if both runs would continue identically: same state, same position, recipes with the same meaning."""
        changed = [change for change in self.recipe if change.policy != "free"]
        return not (changed or self.facts or self.tensors or any((*self.missing.values(), *self.unexpected.values())))


def compare(a: Path, b: Path) -> Differences:
    """Compares two checkpoints of any layouts; one tensor of each is in memory at a time.

    Raises CheckpointError if a checkpoint is damaged, or if a tensor is too large for the memory.
    """
    one, other = CheckpointReader(a), CheckpointReader(b)
    found = Differences(
        recipe=recipe_changes(_recipe(one), _recipe(other)),
        facts=_values(_state(one.manifest), _state(other.manifest)),
        about=_values(_about(one.manifest), _about(other.manifest)),
    )
    for section in SECTIONS:
        mine, theirs = set(one.names(section)), set(other.names(section))
        found.missing[section] = sorted(mine - theirs)
        found.unexpected[section] = sorted(theirs - mine)
        found.compared[section] = len(mine & theirs)
        for name in sorted(mine & theirs):
            found.tensors += _tensor(one, other, section, name)
    return found


# ---------------------------------------------------------------------------------------------- outside tensors
def _state(manifest: Manifest) -> dict[str, Any]:
    """Returns everything by name that decides how a run continues, except tensors and the recipe."""
    position = {key: value for key, value in manifest.position.items() if key != "seconds"}  # wall time
    return {
        "step": manifest.step,
        "samples": manifest.samples,
        **_flat("position", position),
        **_flat("loop", manifest.loop),
        **_flat("aliases", manifest.aliases),
        **{f"optimizer: {o}/{key}": x for o, values in manifest.optimizer.items() for key, x in values.items()},
        **{f"callbacks: {o}/{key}": x for o, values in manifest.callbacks.items() for key, x in values.items()},
    }


def _recipe(reader: CheckpointReader) -> dict[str, Any]:
    try:
        return upgrade_tables(reader.manifest.recipe)
    except ValueError as error:
        raise CheckpointError(f"the recipe in {reader.path} cannot be read: {error}") from error


def _about(manifest: Manifest) -> dict[str, Any]:
    return {
        "created": manifest.created,
        "strategy": manifest.strategy,
        "world_size": manifest.world_size,
        **_flat("versions", manifest.versions),
        **_flat("metrics", metrics(manifest)),
    }


def _flat(owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{owner}.{key}": value for key, value in values.items()}


def _values(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Value]:
    names = [name for name in {**a, **b} if a.get(name) != b.get(name) or (name in a) != (name in b)]
    return [Value(name=name, a=plain(a.get(name)), b=plain(b.get(name))) for name in names]


# ---------------------------------------------------------------------------------------------- tensors
def _tensor(one: CheckpointReader, other: CheckpointReader, section: Section, name: str) -> Iterator[TensorDifference]:
    """Yields the difference, if there is one."""
    kinds = [f"{str(r.dtype(section, name))[6:]} {list(r.shape(section, name))}" for r in (one, other)]
    note = "" if kinds[0] == kinds[1] else f"{kinds[0]} → {kinds[1]}"
    if one.shape(section, name) != other.shape(section, name):
        yield TensorDifference(section=section, name=name, note=note)
        return
    for reader in (one, other):
        _reject_too_large(reader, section, name)
    elements, absolute, relative = _distance(one.read(section, name), other.read(section, name))
    if elements or note:
        yield TensorDifference(
            section=section, name=name, note=note, elements=elements, absolute=absolute, relative=relative
        )


def _reject_too_large(reader: CheckpointReader, section: Section, name: str) -> None:
    """Raises CheckpointError if a tensor does not fit into memory twice."""
    needed = 2 * prod(reader.shape(section, name)) * reader.dtype(section, name).itemsize
    free = psutil.virtual_memory().available
    if needed > free:
        raise CheckpointError(
            f"{name} ({section}) of {reader.path} cannot be compared: it needs {needed:,} bytes of memory, but only "
            f"{free:,} are free",
            hints=["compare on a machine with more memory"],
        )


def _distance(a: Tensor, b: Tensor) -> tuple[int, float, float]:
    """Returns the number of elements that differ, and the largest absolute and relative difference. NaN equals NaN."""
    a, b = a.reshape(-1), b.reshape(-1)
    elements, absolute, relative = 0, 0.0, 0.0
    for start in range(0, len(a), _STRIDE):
        x, y = a[start : start + _STRIDE].double(), b[start : start + _STRIDE].double()
        differ = (x != y) & ~(x.isnan() & y.isnan())
        if not a.is_floating_point():  # different large integers can be equal in float64
            differ = a[start : start + _STRIDE] != b[start : start + _STRIDE]
        if count := int(differ.sum()):
            x, y = x[differ], y[differ]
            gap, size = (x - y).abs(), torch.maximum(x.abs(), y.abs())
            elements += count
            absolute = float(torch.maximum(gap.new_tensor(absolute), gap.max()))
            relative = float(torch.maximum(gap.new_tensor(relative), (gap / size.clamp(min=_TINY)).max()))
    return elements, absolute, relative
