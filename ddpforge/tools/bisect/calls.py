"""Reads what modules computed in a step, and finds the first value that differs between two runs."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ddpforge.api import Rounding, apart, multiple_of, ratio
from ddpforge.tools.bisect.recorder import BACKWARD

__all__ = ["Calls", "Difference", "first_difference"]

_EQUAL = 1e-6  # relative difference of sums that are the same on neighbouring ranks


@dataclass(frozen=True)
class Calls:
    """Sums of all values of a step over all ranks, in the order in which they were computed.

    Attributes:
        shared: by name, the sums on each of the ranks that see the same samples.
        scale: number of data-parallel ranks; a gradient is multiplied by it, and then averaged.
    """

    shared: Mapping[str, Sequence[Tensor]]
    scale: int

    @classmethod
    def read(cls, folder: Path) -> Calls:
        """Reads the files of all ranks."""
        found: dict[str, dict[int, list[Tensor]]] = defaultdict(lambda: defaultdict(list))
        ranks = sorted(folder.glob("calls-*.json"), key=lambda path: int(path.stem.partition("-")[2]))
        data_ranks = set()
        for path in ranks:
            about, values = json.loads(path.read_text(encoding="utf-8")), load_file(path.with_suffix(".safetensors"))
            data_ranks.add(about["data_rank"])
            for name in about["names"]:
                found[name][about["data_rank"]].append(values[name])
        return cls({name: _added(list(groups.values())) for name, groups in found.items()}, len(data_ranks))

    def value(self, name: str, features: int) -> Tensor:
        """Returns the sums of a value (3 × `features`); if the ranks have other features, over all features (3 × 1).

        A rank has fewer features if it computes a share of a layer, in an order of its own.
        """
        parts = self.shared[name]
        same = all(one.shape == parts[0].shape for one in parts)
        if same and all(torch.allclose(one, parts[0], rtol=_EQUAL) for one in parts):
            found = parts[0]  # each rank has computed all of it
        elif same and parts[0].shape[1] == features:
            found = sum(parts[1:], parts[0])  # of its positions
        else:
            found = torch.cat(list(parts), 1).sum(1, keepdim=True)
        if found.shape[1] != features:
            found = found.sum(1, keepdim=True)
        return found / torch.tensor([[self.scale], [self.scale**2], [1]]) if name.startswith(BACKWARD) else found

    def features(self, name: str) -> int:
        """Returns the largest number of features that a rank has of a value."""
        return max(one.shape[1] for one in self.shared[name])


def _added(groups: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Adds up the sums of groups of ranks that see different samples, place by place."""
    found = list(groups[0])
    for group in groups[1:]:
        for place, one in enumerate(group):
            if place < len(found) and found[place].shape == one.shape:
                found[place] = found[place] + one
            else:
                found.append(one)
    return found


@dataclass(frozen=True)
class Difference:
    """First value that differs by more than rounding explains.

    Attributes:
        kind: INPUT of a module, FORWARD, BACKWARD or OPERATION.
        module: name of the module, or of the operation. Of BACKWARD: "input of NAME", or "forward of NAME" for its
            output.
        call: number of the call of the module in a forward pass.
        difference: relative to the sums of the first run; infinite if only one run has the value.
        allowed: largest difference that is rounding.
        multiple: factor from the first run to the second, None if there is none.
    """

    kind: str
    module: str
    call: int
    difference: float
    allowed: float
    multiple: float | None


def first_difference(a: Calls, b: Calls, perturbed: Sequence[Calls], kinds: Sequence[str]) -> Difference | None:
    """Returns the first difference of these kinds, in the order in which the first run computed the values."""
    spread: dict[str, float] = {}
    found: dict[str, tuple[float, float | None]] = {}
    for name in (name for name in a.shared if name.partition("|")[0] in kinds and name in b.shared):
        features = max(a.features(name), b.features(name))
        mine, theirs = a.value(name, features), b.value(name, features)
        if mine.shape != theirs.shape:
            mine, theirs = (one.sum(1, keepdim=True) for one in (mine, theirs))
        if not torch.equal(mine[2], theirs[2]):  # not of samples: it is as large in each pass, e.g. of positions
            if name.startswith(BACKWARD):
                continue
            mine, theirs = mine / mine[2], theirs / theirs[2]
        found[name] = _apart(theirs, mine), multiple_of(theirs[1].sqrt(), mine[1].sqrt())
        near = [one.value(name, mine.shape[1]) for one in perturbed if name in one.shared]
        near = [one / (one[2] / mine[2]) for one in near]
        spread[name] = max((_apart(one, mine) for one in near), default=0.0)
    rounding = Rounding([spread])
    for name, (difference, multiple) in found.items():
        if difference > (allowed := rounding.allowed(1, name)):
            kind, module, call = name.split("|")[:3]
            return Difference(kind, module, int(call), difference, allowed, multiple)
    return None


def _apart(value: Tensor, reference: Tensor) -> float:
    """Returns the larger difference of both sums, relative to the root of all squares and to the squares."""
    if value.shape != reference.shape:
        return math.inf
    squares = apart({"": value[1]}, {"": reference[1]})[""]
    if not (value.isfinite().all() and reference.isfinite().all()):
        return squares
    return max(squares, ratio(float((value[0] - reference[0]).norm()), float(reference[1].sum().sqrt())))
