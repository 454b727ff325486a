"""Fingerprints of what ranks read and have built, to compare over ranks and with what a checkpoint was saved with."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.data import MicroBatch, fetch_some
from ddpforge.data.nests import digest, leaves
from ddpforge.data.randomness import own_random_numbers
from ddpforge.data.streams import is_stream
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import Ranks, World
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.training.stages import Built

__all__ = [
    "DataPrint",
    "Fingerprint",
    "compare_built",
    "difference",
    "refuse_changed_data",
    "refuse_other_data",
    "refuse_other_groups",
    "refuse_other_models",
]

log = logging.getLogger("ddpforge")

_MOMENT = 0.5  # seconds for the samples of a dataset
_SAMPLES, _LEAVES = 8, 16  # samples of a dataset, and tensors of a sample


class Fingerprint:
    """A fingerprint of what one rank has read from a stream, to compare with others; data with a length has none."""

    def __init__(self) -> None:
        self._read = 0  # what the newest micro-batch says has been read

    def note(self, micro: MicroBatch) -> None:
        """Takes note of the newest micro-batch."""
        self._read = micro.read

    def noted(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The same micro-batches, of which each is noted when it is taken."""
        for micro in micro_batches:
            self.note(micro)
            yield micro

    def totals(self) -> dict[str, float]:
        """The totals to average over ranks: the mean of squares is the square of the mean if all agree.

        Squares of 20 bits add up exactly in float64, on up to 8,192 ranks.
        """
        if not self._read:
            return {}
        return {"?read1": self._read, "?read2": self._read**2}

    def refuse_another(self, means: dict[str, float], *, step: int) -> None:
        """Takes the means of `totals` out of `means`; raises PluginError where ranks have read different samples."""
        mean, square = means.pop("?read1", 0.0), means.pop("?read2", 0.0)
        if mean**2 != square:
            raise PluginError(
                f"ranks read different samples from the iterable dataset, by step {step}: some would be "
                "used twice and others never",
                hints=[
                    "it must yield the same samples in the same order on every rank: do not shard it by rank, and do "
                    "not order by set or hash",
                    "shuffle with python's, numpy's or torch's own generator (seeded alike before each pass), or one "
                    "seeded from the epoch that `set_epoch` is told",
                ],
            )


# ---------------------------------------------------------------------------------------------- what ranks have built
def compare_built(parts: Built, world: World) -> dict[str, DataPrint]:
    """Raises on every rank unless all have built the same model and data; returns the data's fingerprints by key."""
    refuse_other_models(world.all, parts.model)
    workers = parts.recipe.data.workers
    fetching = {"seed": parts.recipe.train.seed, "workers": 0 if workers == "auto" else workers}
    prints = {key: DataPrint(data, **fetching) for key, data in parts.data.items()}
    refuse_other_data(world.all, prints)
    return prints


def refuse_other_models(ranks: Ranks, model: nn.Module) -> None:
    """Raises on every rank unless all have built `model` of the same tensors in the same order.

    Strategies pair the tensors of ranks by their place: a model that registers its modules in the order of a set would
    mix the gradients of different layers.
    """
    if ranks.size == 1:
        return
    lines = [_described_tensor("parameter", name, x) for name, x in model.named_parameters(remove_duplicate=False)]
    lines += [_described_tensor("buffer", name, x) for name, x in model.named_buffers(remove_duplicate=False)]
    _refuse_other_lines(ranks, lines, "model", "register modules and parameters in one order")


def refuse_other_groups(ranks: Ranks, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises on every rank unless the optimizers of ranks with the same parameters have the same groups of them."""
    if ranks.size == 1:
        return
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    lines = []
    for number, group in enumerate(optimizer.param_groups):
        options = {key: x for key, x in group.items() if isinstance(x, bool | int | float | str | tuple)}
        lines.append(f"parameter group {number} with {sorted(options.items())}")
        lines += [f"`{names.get(id(one), '?')}` in parameter group {number}" for one in group["params"]]
    # Of a pipeline's stages each has the others' parameters without memory, and trains its own.
    here = [(name, x) for name, x in model.named_parameters() if not x.is_meta]
    held = _digest_of([_described_tensor("parameter", name, x) for name, x in here])
    _refuse_other_lines(ranks, lines, "optimizer", "make parameter groups in one order", among=held)


def _described_tensor(kind: str, name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    frozen = "" if kind == "buffer" or tensor.requires_grad else ", frozen"
    return f"{kind} `{name}` ({dtype} {list(tensor.shape)}{frozen})"


def _digest_of(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _refuse_other_lines(ranks: Ranks, lines: Sequence[str], what: str, way: str, among: str = "") -> None:
    """Compares descriptions with those of the first rank that is in the same group; names the first difference."""
    told: list[tuple[str, str]] = ranks.everyone((among, _digest_of(lines)))
    first = {group: rank for rank, (group, _) in reversed(list(enumerate(told)))}
    if all(its == told[first[group]][1] for group, its in told):
        return
    everyones: list[list[str]] = ranks.everyone(list(lines))

    def refuse() -> None:
        for rank, (group, hashed) in enumerate(told):
            one = first[group]
            if hashed == told[one][1]:
                continue
            pairs = enumerate(zip_longest(everyones[one], everyones[rank], fillvalue="nothing"))
            place, (theirs, its) = next((place, pair) for place, pair in pairs if pair[0] != pair[1])
            raise PluginError(
                f"ranks have built the {what} differently: as number {place} rank {one} has {theirs}, and rank {rank} "
                f"has {its}",
                hints=[
                    f"{way} on every rank: not in that of a set, a folder's listing or a hash, nor by the rank",
                    "PYTHONHASHSEED=0 in the environment makes sets alike on all ranks",
                ],
            )

    on_rank_zero(ranks, refuse)


# ---------------------------------------------------------------------------------------------- data with a length
class DataPrint:
    """A fingerprint of a dataset: its length, and a few of its samples, to compare over ranks and with a checkpoint.

    Of the floating-point numbers in a sample there are sums, which other processors and versions of libraries change by
    rounding only; of all else a hash. A stream has neither length nor samples, unless it promises a length.
    """

    def __init__(self, data: Any, *, seed: int, workers: int) -> None:
        """Fetches samples as training does: in a loader process where `workers` fetch, as data may open files there."""
        self._data, self._seed, self._workers = data, seed, workers
        self.length: int | None = len(data) if hasattr(data, "__len__") else None
        self.samples: dict[str, list[Any]] = {}
        if not is_stream(data) and self.length:
            self.samples = self._fetched(_spread_out(self.length))

    def _fetched(self, places: Sequence[int]) -> dict[str, list[Any]]:
        """The sketches of samples by their places, as many as come within a moment; none where one cannot be read."""
        found: dict[str, list[Any]] = {}
        began = time.monotonic()
        try:
            with own_random_numbers():
                for place, sample in fetch_some(self._data, places, seed=self._seed, workers=self._workers):
                    found[str(place)] = _sketch(sample)
                    if time.monotonic() - began > _MOMENT:
                        break
        except Exception as error:  # training says what is wrong, if it ever asks for that sample
            log.debug("samples of the data could not be compared: %s", error)
        return found

    def as_json(self) -> dict[str, Any]:
        """The fingerprint, as a checkpoint has it."""
        return {"length": self.length, "samples": self.samples}

    def is_reproducible(self) -> bool:
        """True if the samples are the same when they are fetched again: only then may others be compared with them."""
        again = self._fetched([int(place) for place in self.samples])
        return all(place in again and _alike(again[place], sketch) for place, sketch in self.samples.items())


def _spread_out(length: int) -> list[int]:
    """A few places from first to last, the most telling ones first."""
    places = [0, length - 1, *(length * eighths // 8 for eighths in (4, 2, 6, 1, 3, 5, 7))]
    return list(dict.fromkeys(places))[:_SAMPLES]


def _counted(length: object) -> str:
    return "no length" if length is None else f"{length} samples"


def _sketch(sample: Any) -> list[Any]:
    """A hash of all but floating-point numbers, and of these sums: their mean, their size, and one that tells order."""
    rest: list[Any] = []
    numbers: list[float | None] = []
    for leaf in leaves(sample):
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind == "f":
            leaf = torch.from_numpy(leaf.copy())
        if isinstance(leaf, float):
            leaf = torch.tensor(leaf, dtype=torch.float64)
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.numel():
            rest.append(f"{leaf.dtype}{list(leaf.shape)}")
            values = leaf.detach().double().flatten().cpu()
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
    """Describes the difference between two fingerprints of a dataset (as JSON); empty where none is found."""
    if before.get("length") != after.get("length"):
        return f"{_counted(before.get('length'))} → {_counted(after.get('length'))}"
    one, other = before.get("samples"), after.get("samples")
    if not isinstance(one, dict) or not isinstance(other, dict):
        return ""
    for place, sketch in one.items():
        if place in other and not _alike(sketch, other[place]):
            return f"sample {place} is another one"
    return ""


def refuse_other_data(ranks: Ranks, prints: Mapping[str, DataPrint]) -> None:
    """Raises on every rank unless all have the same datasets: as long, and with the same few samples.

    A rank whose dataset is ordered otherwise computes samples twice, and others never. Data that gives other samples
    when it is read again is compared by its length alone.
    """
    if ranks.size == 1:
        return
    told: list[dict[str, Any]] = ranks.everyone({key: one.as_json() for key, one in prints.items()})
    found = [
        (key, rank, what)
        for key in prints
        for rank in range(1, ranks.size)
        if (what := difference(told[0][key], told[rank][key]))
    ]
    if not found:
        return
    differing = {key for key, _, _ in found}
    if not all(ranks.everyone(all(prints[key].is_reproducible() for key in differing))):
        found = [(key, rank, what) for key, rank, what in found if told[0][key]["length"] != told[rank][key]["length"]]

    def refuse() -> None:
        for key, rank, what in found:
            raise PluginError(
                f"ranks have different data: [data.{key}] on rank 0 and on rank {rank}: {what}",
                hints=[
                    "give every rank the same samples in the same order: sort the listing of a folder, and order "
                    "neither by a set or a hash nor by the rank",
                    "PYTHONHASHSEED=0 in the environment makes sets alike on all ranks",
                ],
            )

    on_rank_zero(ranks, refuse)


def _is_allowed(table: str, allowed: Sequence[str]) -> bool:
    """True if a change of the table, of one around it or of a key in it is allowed."""
    return any(f"{table}.".startswith(f"{path}.") or path.startswith(f"{table}.") for path in allowed)


def refuse_changed_data(prints: Mapping[str, DataPrint], saved: Mapping[str, Any], allowed: Sequence[str]) -> None:
    """Raises UsageError where a dataset is not the one that a checkpoint was `saved` with.

    `allowed` holds keys and tables of the recipe whose change is allowed: "data.train", "data".
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
            "the data is no longer that of the run which would be resumed:\n"
            + "\n".join(f"  {key}: {what}" for key, what in changed.items()),
            hints=[
                "give it the data that it began with, or start from scratch with --fresh; the earlier run is kept "
                "under another name",
                "or resume all the same: " + " ".join(f"--allow-change {key}" for key in changed),
            ],
        )
