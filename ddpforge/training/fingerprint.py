"""Fingerprints of the data that ranks read and the parts that they built, compared over ranks and with checkpoints."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.components.registry import OBJECT
from ddpforge.data import fetch_some
from ddpforge.data.pytree import digest, leaves
from ddpforge.data.rng import isolated_rng
from ddpforge.data.sources import by_name
from ddpforge.data.streams import is_stream
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import Ranks, World
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.training.data_names import DataNames
from ddpforge.training.stages import Built

__all__ = [
    "DataPrint",
    "check_same_data",
    "check_same_groups",
    "check_same_models",
    "check_same_schedules",
    "check_same_weights",
    "check_unchanged_data",
    "compare_built",
    "difference",
]

log = logging.getLogger("ddpforge")

_MOMENT = 0.5  # seconds to fetch samples of a dataset
_SAMPLES, _LEAVES = 8, 16  # at most: samples of a dataset, tensors of a sample


# ---------------------------------------------------------------------------------------------- built parts
def compare_built(parts: Built, world: World) -> dict[str, DataPrint]:
    """Raises on every rank unless all ranks have built the same model and data; returns the data's fingerprints."""
    check_same_models(world.global_ranks, parts.model)
    if parts.recipe.model.use.startswith(OBJECT):
        check_same_weights(world.global_ranks, parts.model)
    workers = parts.recipe.data.workers
    fetching = {"seed": parts.recipe.train.seed, "workers": 0 if workers == "auto" else workers}
    prints = {
        f"{key}.{name}" if name else key: DataPrint(one, **fetching)
        for key, data in parts.data.items()
        for name, one in by_name(data).items()
    }
    check_same_data(world.global_ranks, prints)
    return prints


def check_same_models(ranks: Ranks, model: nn.Module) -> None:
    """Raises on every rank unless all ranks have built `model` with the same tensors in the same order."""
    if ranks.size == 1:
        return
    # Strategies match the tensors of ranks by position: with modules registered in the order of a set, they would mix
    # the gradients of different layers.
    lines = [_described_tensor("parameter", name, x) for name, x in model.named_parameters(remove_duplicate=False)]
    lines += [_described_tensor("buffer", name, x) for name, x in model.named_buffers(remove_duplicate=False)]
    _reject_other_lines(ranks, lines, "model", "register modules and parameters in the same order")


def check_same_weights(ranks: Ranks, model: nn.Module) -> None:
    """Raises on every rank unless the weights of `model` are the same on all ranks."""
    if ranks.size == 1:
        return
    # Any other model is built from the recipe's seed. An object was made by the caller's script, before ddpforge runs.
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    lines = [f"`{name}` with the hash {digest(x)[:8]}" for name, x in state.items() if not x.is_meta]
    _reject_other_lines(ranks, lines, "model", "call torch.manual_seed(0) before the model is made")


def check_same_groups(ranks: Ranks, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises on every rank unless all ranks with the same parameters have the same parameter groups."""
    if ranks.size == 1:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: x for key, x in group.items() if isinstance(x, bool | int | float | str | tuple)}
        lines.append(f"parameter group {number} with {sorted(options.items())}")
        lines += [f"`{names.get(id(one), '?')}` in parameter group {number}" for one in group["params"]]
    # A pipeline stage has the parameters of other stages on the meta device, and trains only its own.
    here = [(name, x) for name, x in model.named_parameters() if not x.is_meta]
    held = _digest_of([_described_tensor("parameter", name, x) for name, x in here])
    _reject_other_lines(ranks, lines, "optimizer", "make parameter groups in the same order", among=held)


def check_same_schedules(ranks: Ranks, schedules: Mapping[str, Callable[[int], float]], total: int | None) -> None:
    """Raises on every rank unless all ranks have the same values of all schedules, at up to a hundred steps."""
    if ranks.size == 1:
        return
    last = (total or 100) - 1
    steps = sorted({last * part // 99 for part in range(100)})
    lines = [
        f"{schedule(step):.9g} of `{name or 'lr'}` at step {step}"
        for name, schedule in schedules.items()
        for step in steps
    ]
    _reject_other_lines(ranks, lines, "schedule", "give every rank the same schedule")


def _described_tensor(kind: str, name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    frozen = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
    return f"{kind} `{name}` ({dtype} {list(tensor.shape)}{frozen})"


def _digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _reject_other_lines(ranks: Ranks, lines: Sequence[str], what: str, way: str, among: str = "") -> None:
    """Raises on every rank if `lines` differ from those of the first rank with the same `among`.

    The error has the first difference; `way` begins its hint.
    """
    gathered: list[tuple[str, str]] = ranks.all_gather_object((among, _digest_of(lines)))
    first = {group: rank for rank, (group, _) in reversed(list(enumerate(gathered)))}
    if all(its == gathered[first[group]][1] for group, its in gathered):
        return
    everyones: list[list[str]] = ranks.all_gather_object(list(lines))

    def refuse() -> None:
        for rank, (group, hashed) in enumerate(gathered):
            one = first[group]
            if hashed == gathered[one][1]:
                continue
            pairs = enumerate(zip_longest(everyones[one], everyones[rank], fillvalue="nothing"))
            place, (theirs, its) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            raise PluginError(
                f"ranks have built the {what} differently: number {place} on rank {one} is {theirs}, and on rank "
                f"{rank} it is {its}",
                hints=[
                    f"{way} on every rank: not in the order of a set, a folder listing or a hash, nor by the rank",
                    "PYTHONHASHSEED=0 in the environment gives sets the same order on all ranks",
                ],
            )

    on_rank_zero(ranks, refuse)


# ---------------------------------------------------------------------------------------------- data with a length
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


def check_same_data(ranks: Ranks, prints: Mapping[str, DataPrint]) -> None:
    """Raises on every rank unless all ranks have the same datasets: of equal length, with equal first few samples.

    If samples change when they are read again, only the length of the data is compared.
    """
    if ranks.size == 1:
        return
    # If one rank had another order, some samples would be used twice, and others never.
    gathered: list[dict[str, Any]] = ranks.all_gather_object({key: one.as_json() for key, one in prints.items()})
    found = [
        (key, rank, what)
        for key in prints
        for rank in range(1, ranks.size)
        if (what := difference(gathered[0][key], gathered[rank][key]))
    ]
    if not found:
        return
    differing = {key for key, _, _ in found}
    if not all(ranks.all_gather_object(all(prints[key].is_reproducible() for key in differing))):
        found = [
            (key, rank, what)
            for key, rank, what in found
            if gathered[0][key]["length"] != gathered[rank][key]["length"]
        ]

    def refuse() -> None:
        for key, rank, what in found:
            raise PluginError(
                f"ranks have different data: [data.{key}] on rank 0 and on rank {rank}: {what}",
                hints=[
                    "give every rank the same samples in the same order: sort the listing of a folder, and do not "
                    "order by a set, a hash or the rank",
                    "PYTHONHASHSEED=0 in the environment gives sets the same order on all ranks",
                ],
            )

    on_rank_zero(ranks, refuse)


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
