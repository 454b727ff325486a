"""Iterable datasets in parts of known length: computes the samples that each process reads from the step number.

In each epoch, the parts are concatenated in the order of the epoch to one row of samples. The row is cut into P × T
lanes. Step s takes consecutive samples from each of the P lanes with number s mod T. The length of a lane is the number
of samples that all steps take from it. So every sample is used once for any lengths of parts, also in an incomplete
last step. The places of a step are divided among ranks as for any other dataset. A process reads only its own samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset, get_worker_info

from ddpforge import compat
from ddpforge.data.batch_assignment import AssignmentTerms, MicroBatch
from ddpforge.data.collating import collate_of
from ddpforge.data.pytree import digest
from ddpforge.data.rng import seed_all
from ddpforge.errors import PluginError
from ddpforge.features.mixture import MixtureSampler
from ddpforge.features.sources import ShardedSources
from ddpforge.interfaces import BatchSampler, ShardedDataset, mix
from ddpforge.interfaces.permutation import key, permute

__all__ = ["MixedReader", "ShardOrder", "ShardReader", "ShardedStream", "check_parts"]

_PARTS, _WINDOW, _SAMPLE, _MIXED = 0x9A27, 0x31D0, 0x5A3E, 0x3171  # different seeds for different uses

Numbers = NDArray[np.uint64]
_Read = tuple[int, int, Any]  # a part, a place in there, the sample


def check_parts(data: ShardedDataset) -> None:
    """Raises PluginError unless the attributes of a dataset in parts are whole numbers in their ranges."""
    name = type(data).__name__
    if not _whole_numbers(getattr(data, "shard_sizes", None), least=0):
        raise PluginError(f"{name}.shard_sizes must hold the number of samples of each part: whole numbers, at least 0")
    if not _whole_numbers(data.interleave, least=1) or len(data.interleave) != 2:
        raise PluginError(f"{name}.interleave must be two whole numbers of at least 1, not {data.interleave}")
    if not _whole_numbers([data.shuffle_buffer], least=1):
        raise PluginError(f"{name}.shuffle_buffer must be at least 1, not {data.shuffle_buffer}")


def _whole_numbers(found: Any, *, least: int) -> bool:
    return isinstance(found, Iterable) and all(isinstance(one, Integral) and int(one) >= least for one in found)


@dataclass(frozen=True)
class ShardOrder:
    """Layout of one epoch: the lane of each place, and the position of each lane in the row of all parts."""

    samples: int
    global_batch: int
    drop_last: bool
    lanes: tuple[int, int]

    @cached_property
    def steps_per_epoch(self) -> int:
        """Returns the steps of the epoch, including an incomplete last one unless it is dropped."""
        full, rest = divmod(self.samples, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    def size(self, step: int) -> int:
        """Returns the number of samples in a step of the epoch."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    @cached_property
    def lengths(self) -> Numbers:
        """Returns the number of samples that all steps take from each lane."""
        across, turns = self.lanes
        steps = np.arange(turns)
        full, rest = divmod(self.samples, self.global_batch)
        often = full // turns + (steps < full % turns)  # number of full steps s for each s mod T
        found: NDArray[np.int64] = np.diff(self._edges(self.global_batch))[:, None] * often
        if rest and not self.drop_last:
            found[:, full % turns] += np.diff(self._edges(rest))
        assert found.shape == (across, turns)
        return found.ravel().astype(np.uint64)

    @cached_property
    def begins(self) -> Numbers:
        """Returns the place of each lane's first sample in the row of all parts."""
        return np.cumsum(self.lengths) - self.lengths

    def find(self, step: int, places: range) -> tuple[NDArray[Any], NDArray[Any]]:
        """Returns the lanes of these places of a step, and the offset of each within its lane."""
        across, turns = self.lanes
        size, wanted = self.size(step), np.arange(places.start, places.stop)
        blocks = ((wanted + 1) * across - 1) // size
        earlier = step // turns * np.diff(self._edges(self.global_batch))[blocks]  # only the last step is not full
        return blocks * turns + step % turns, earlier + wanted - self._edges(size)[blocks]

    def _edges(self, size: int) -> NDArray[np.int64]:
        """Returns the places of a step with `size` samples at which each lane begins, and the end."""
        return np.arange(self.lanes[0] + 1) * size // self.lanes[0]


class ShardReader:
    """Reader of the samples of one process; keeps a read position for each lane."""

    def __init__(self, data: ShardedDataset, terms: AssignmentTerms) -> None:
        self.data, self._seed = data, terms.seed
        self._lengths = np.array(data.shard_sizes, dtype=np.int64)
        self._starts = np.cumsum(self._lengths) - self._lengths
        samples = int(self._lengths.sum())
        self.layout = ShardOrder(samples, terms.global_batch, terms.drop_last, data.interleave)
        self._epoch: int | None = None

    def read(self, epoch: int, step: int, places: range) -> list[tuple[int, Any]]:
        """Returns the samples at these places of a step of an epoch, each with its place in the dataset."""
        if epoch != self._epoch:
            self._begin(epoch)
        lanes, along = self.layout.find(step, places)
        return [self._take(lane, place) for lane, place in zip(lanes.tolist(), along.tolist(), strict=True)]

    def _begin(self, epoch: int) -> None:
        parts = np.arange(len(self._lengths), dtype=np.uint64)
        if self.data.shuffle:
            parts = permute(parts, np.full_like(parts, epoch), len(parts), mix(self._seed, _PARTS))
        self._order = parts.astype(np.int64)
        self._ends = np.cumsum(self._lengths[self._order])
        self._epoch = epoch
        self._cursors: dict[int, _Cursor] = {}
        self._windows: dict[int, tuple[int, list[_Read]]] = {}

    def _take(self, lane: int, place: int) -> tuple[int, Any]:
        """Returns the place in the dataset and the prepared sample at a place of a lane; reads whole windows."""
        number, within = divmod(place, self.data.shuffle_buffer)
        if self._windows.get(lane, (-1,))[0] != number:
            begin, length = number * self.data.shuffle_buffer, int(self.layout.lengths[lane])
            samples = self._neighbours(lane, begin, min(begin + self.data.shuffle_buffer, length))
            self._windows[lane] = number, self._shuffled(samples, lane, number)
        part, place, sample = self._windows[lane][1][within]
        if getattr(self.data, "random", True):
            assert self._epoch is not None
            seed_all(mix(self._seed, _SAMPLE, self._epoch, part, place))
        return int(self._starts[part]) + place, self.data.prepare(sample)

    def _shuffled(self, samples: list[_Read], lane: int, window: int) -> list[_Read]:
        if len(samples) < 2:
            return samples
        which = key(*(np.full(len(samples), part, dtype=np.uint64) for part in (self._epoch, lane, window)))
        places = permute(np.arange(len(samples), dtype=np.uint64), which, len(samples), mix(self._seed, _WINDOW))
        return [samples[place] for place in places.tolist()]

    def _neighbours(self, lane: int, begin: int, end: int) -> list[tuple[int, int, Any]]:
        """Returns the samples from `begin` to `end` (exclusive) of a lane, each with its part and its place in it."""
        first = int(self.layout.begins[lane])
        if lane not in self._cursors:
            self._cursors[lane] = _Cursor(self.data)
        return [
            self._cursors[lane].sample(*self._where(first + place), self._epoch or 0) for place in range(begin, end)
        ]

    def _where(self, place: int) -> tuple[int, int]:
        """Returns the part of a place in the row of all parts, and the place within the part."""
        turn = int(np.searchsorted(self._ends, place, side="right"))
        part = int(self._order[turn])
        return part, place - int(self._ends[turn] - self._lengths[part])


class _Cursor:
    """Open part and its read position."""

    def __init__(self, data: ShardedDataset) -> None:
        self._data = data
        self._part, self._place = -1, 0
        self._samples: Iterator[Any] = iter(())

    def sample(self, part: int, place: int, epoch: int) -> _Read:
        """Returns the sample at a place of a part.

        Continues from the read position, and skips samples by reading them unless the data is `seekable`. Otherwise
        opens the part anew.
        """
        gap = place - self._place
        if part != self._part or gap < 0 or (gap > 0 and self._data.seekable):
            self._samples, gap = iter(self._data.iter_shard(part, epoch=epoch, skip=place)), 0
        for _ in range(gap):
            next(self._samples, None)
        self._part, self._place = part, place + 1
        for sample in self._samples:
            self._reject_more(part, place)
            return part, place, sample
        raise PluginError(
            f"part {part} of {type(self._data).__name__} ended before its sample {place}, but by `shard_sizes` "
            f"it has {self._data.shard_sizes[part]}",
            hints=["`shard_sizes` must hold the number of samples that `iter_shard` yields for each part"],
        )

    def _reject_more(self, part: int, place: int) -> None:
        """Raises PluginError if a part has more samples than in `shard_sizes`: they would never be used."""
        if place + 1 == self._data.shard_sizes[part] and any(True for _ in self._samples):
            raise PluginError(
                f"part {part} of {type(self._data).__name__} has more samples than `shard_sizes`: {place + 1}",
                hints=["`shard_sizes` must hold the number of samples that `iter_shard` yields for each part"],
            )


class MixedReader:
    """Reader of the samples of one process from several sources in parts, in the order of a mixture.

    A source is read in epochs of its own, as if each of its steps had the mean number of its samples in a step.
    """

    def __init__(self, data: ShardedSources, terms: AssignmentTerms, order: MixtureSampler) -> None:
        self.layout, self._order, self._data = order, order, data
        cycle = order.stages[0].cycle
        self._readers = [
            ShardReader(
                source,
                replace(
                    terms,
                    global_batch=max(1, round(terms.global_batch * count / sum(cycle))),
                    seed=mix(terms.seed, _MIXED, number),
                    drop_last=False,
                ),
            )
            for number, ((_, source), count) in enumerate(zip(data.items(), cycle, strict=True))
        ]

    def read(self, epoch: int, step: int, places: range) -> list[tuple[int, Any]]:
        """Returns the samples at these places of a step of an epoch, each with its place in all sources."""
        first = (epoch * self.layout.steps_per_epoch + step) * self.layout.global_batch
        sources, turns = self._order.turns(np.arange(first + places.start, first + places.stop, dtype=np.uint64))
        found: list[Any] = [None] * len(places)
        for number in np.unique(sources).tolist():
            here = np.flatnonzero(sources == number)
            for place, sample in zip(here.tolist(), self._read(number, turns[here]), strict=True):
                found[place] = sample
        return found

    def _read(self, number: int, turns: NDArray[np.int64]) -> Iterator[tuple[int, Any]]:
        """Yields the samples of a source at successive `turns`."""
        reader, begin = self._readers[number], int(self._data.begins[number])
        layout = reader.layout
        for turn in turns.tolist():
            epoch, within = divmod(turn, layout.samples)
            step, place = divmod(within, layout.global_batch)
            for index, sample in reader.read(epoch, step, range(place, place + 1)):
                yield begin + index, sample


class ShardedStream(IterableDataset[MicroBatch]):
    """Micro-batches of a rank from data in parts; every rank and every loader process reads only its own samples.

    `order` is that of several sources.
    """

    def __init__(
        self,
        data: ShardedDataset | ShardedSources,
        terms: AssignmentTerms,
        order: BatchSampler | None,
        start: int,
        stop_after_epoch: bool,
    ) -> None:
        self.data, self.terms = data, terms
        self.order = order if isinstance(order, MixtureSampler) else None
        self.start, self.stop_after_epoch = start, stop_after_epoch
        self.collate = collate_of(data, terms.keys)
        self.random: bool = getattr(data, "random", True)

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = get_worker_info()
        if worker:
            compat.hide_worker()  # otherwise the dataset might divide itself among the loader processes
        yield from self.batches(worker.id if worker else 0, worker.num_workers if worker else 1)

    def batches(self, mine: int, workers: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches of loader process `mine` of `workers`: every `workers`-th one."""
        reader, turn, share = self._reader(), count(), self.terms.share
        read = int(digest([*map(int, self.data.shard_sizes)])[:5], 16) or 1  # detects ranks with different parts
        kept: list[tuple[int, Any]] = []
        for step in count(self.start):
            epoch, within = divmod(step, reader.layout.steps_per_epoch)
            if self.stop_after_epoch and epoch:
                return
            size = reader.layout.size(within)
            micro = share.deal(size)
            for number, part in enumerate(micro):
                if next(turn) % workers == mine:
                    # A padding sample is one that was read last, so that no sample is read again for it.
                    kept = reader.read(epoch, within, part or range(1)) if part or not kept else kept[:1]
                    if self.random:
                        seed_all(mix(self.terms.seed, step, part.start))
                    whose, last = share.whose(number, len(micro)), number + 1 == len(micro)
                    numbers, samples = zip(*kept, strict=True)
                    places = np.array(numbers) if self.stop_after_epoch or self.order else None
                    yield MicroBatch(self.collate(list(samples)), len(part), size, last, *whose, read, places)

    def _reader(self) -> ShardReader | MixedReader:
        if isinstance(self.data, ShardedDataset):
            return ShardReader(self.data, self.terms)
        assert self.order
        return MixedReader(self.data, self.terms, self.order)
