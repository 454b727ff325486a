"""Fingerprints of datasets, compared over ranks and with the checkpoint of an earlier attempt."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ddpforge.data import fetch_some, is_stream
from ddpforge.data.pytree import digest, leaves
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import UsageError
from ddpforge.features.sources import by_name
from ddpforge.training.data_names import DataNames
from ddpforge.training.stages import Built

__all__ = ["RESUME", "DataPrint", "check_unchanged_data", "difference", "prints_of"]

log = logging.getLogger("ddpforge")

_MOMENT = 0.5  # seconds to fetch samples of a dataset
_SAMPLES, _LEAVES = 8, 16  # at most: samples of a dataset, tensors of a sample


def prints_of(parts: Built) -> dict[str, DataPrint]:
    """Returns the fingerprint of each dataset, and of each source of the training data, by the recipe's key."""
    workers = parts.recipe.data.workers
    fetching = {"seed": parts.recipe.train.seed, "workers": 0 if workers == "auto" else workers}
    return {
        f"{key}.{name}" if name else key: DataPrint(one, **fetching)
        for key, data in parts.data.items()
        for name, one in by_name(data).items()
    }


class DataPrint:
    """Fingerprint of a dataset: its length and a few of its samples, compared over ranks and with a checkpoint.

    Floating-point numbers of a sample are kept as sums, which change only by rounding on other processors and with
    other library versions. All else is hashed. A stream has no samples, and a length only if it has `__len__`.
    """

    def __init__(self, data: Any, *, seed: int, workers: int) -> None:
        """Fetches samples as training does: with `workers`, in a loader process, because data may open files there."""
        self._data, self._seed, self._workers = data, seed, workers
        self.length: int | None = len(data) if hasattr(data, "__len__") else None
        self.names = DataNames.of(data)
        self.samples: dict[str, list[Any]] = {}
        if not is_stream(data) and self.length:
            self.samples = self._fetched(_spread_out(self.length))

    def _fetched(self, places: Sequence[int]) -> dict[str, list[Any]]:
        """Returns sketches of samples by their places, until half a second has passed or a sample cannot be read."""
        found: dict[str, list[Any]] = {}
        began = time.monotonic()
        try:
            with isolated_rng():
                for place, sample in fetch_some(self._data, places, seed=self._seed, workers=self._workers):
                    found[str(place)] = _sketch(sample)
                    if time.monotonic() - began > _MOMENT:
                        break
        except Exception as error:  # training raises it too, if it reaches that sample
            log.debug("samples of the data could not be compared: %s", error)
        return found

    def as_json(self) -> dict[str, Any]:
        """Returns the fingerprint in the form that a checkpoint stores."""
        return {"length": self.length, **self.names.as_json(), "samples": self.samples}

    def is_reproducible(self) -> bool:
        """True if the samples are the same when they are fetched again; if not, they cannot be compared."""
        again = self._fetched([int(place) for place in self.samples])
        return all(place in again and _alike(again[place], sketch) for place, sketch in self.samples.items())


def _spread_out(length: int) -> list[int]:
    """Returns a few places from the first to the last, the most significant ones first."""
    places = [0, length - 1, *(length * eighths // 8 for eighths in (4, 2, 6, 1, 3, 5, 7))]
    return list(dict.fromkeys(places))[:_SAMPLES]


def _counted(length: object) -> str:
    return "no length" if length is None else f"{length} samples"


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:10])) + (" …" if len(names) > 10 else "") if names else "without names"


def _sketch(sample: Any) -> list[Any]:
    """Returns a hash of all but floating-point tensors, and three means of each tensor: plain, absolute, weighted."""
    rest: list[Any] = []
    numbers: list[float | None] = []
    for leaf in leaves(sample):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            leaf = torch.from_numpy(leaf.copy())
        if isinstance(leaf, float):
            leaf = torch.tensor(leaf, dtype=torch.float64)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            rest.append(f"{leaf.dtype}{list(leaf.shape)}")
            values = leaf.detach().cpu().double().flatten()
            sums = values.mean(), values.abs().mean(), (values * torch.linspace(0.0, 1.0, len(values)).double()).mean()
            numbers += (
                [float(one) if math.isfinite(one) else None for one in sums] if len(numbers) < _LEAVES * 3 else []
            )
        else:
            rest.append(leaf)
    return [digest(rest)[:16], *numbers]


def _alike(one: Sequence[Any], other: Any) -> bool:
    if not isinstance(other, list) or len(one) != len(other) or one[:1] != other[:1]:
        return False
    for start in range(1, len(one) - 2, 3):
        mine, theirs = one[start : start + 3], other[start : start + 3]
        if [x is None for x in mine] != [x is None for x in theirs]:
            return False
        if any(abs(x - y) > 1e-5 * (mine[1] or 1.0) for x, y in zip(mine, theirs, strict=True) if x is not None):
            return False
    return True


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Describes the difference between two fingerprints of a dataset (as JSON); empty if none is found."""
    if before.get("length") != after.get("length"):
        return f"{_counted(before.get('length'))} → {_counted(after.get('length'))}"
    for key, noun in (("class_names", "classes"), ("input_names", "columns")):
        names, now = before.get(key), after.get(key, [])
        if isinstance(names, list) and names != now:
            return f"{noun} {_listed(names)} → {_listed(now)}"
    one, other = before.get("samples"), after.get("samples")
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    for place, sketch in one.items():
        if place in other and not _alike(sketch, other[place]):
            return f"sample {place} is different"
    return ""


def _is_allowed(table: str, allowed: Sequence[str]) -> bool:
    """True if `allowed` has the table, a table around it, or a key in it."""
    return any(f"{table}.".startswith(f"{path}.") or path.startswith(f"{table}.") for path in allowed)


def check_unchanged_data(prints: Mapping[str, DataPrint], saved: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raises UsageError if a dataset differs from the fingerprint that a checkpoint `saved`.

    `allowed` holds the keys and tables of the recipe that may change: "data.train", "data".
    """
    changed = {}
    for key, one in prints.items():
        before = saved.get(key)
        if isinstance(before, dict) and not _is_allowed(f"data.{key}", allowed):
            what = difference(before, one.as_json())
            if what and (before.get("length") != one.length or one.is_reproducible()):
                changed[f"data.{key}"] = what
    if changed:
        raise UsageError(
            "the data has changed since the run that would be resumed:\n"
            + "\n".join(f"  {key}: {what}" for key, what in changed.items()),
            hints=[
                "use the data that the run began with, or start from scratch with --fresh; the earlier run is kept "
                "under another name",
                "or resume anyway: " + " ".join(f"--allow-change {key}" for key in changed),
            ],
        )


RESUME = (("", check_unchanged_data),)
