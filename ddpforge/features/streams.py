"""Iterable datasets: divides their samples among ranks and loader processes; checks that ranks read the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from ddpforge import compat
from ddpforge.data import is_stream
from ddpforge.data.batch_assignment import AssignmentTerms, MicroBatch
from ddpforge.data.collating import collate_of
from ddpforge.data.fetching import Reader
from ddpforge.data.pytree import digest
from ddpforge.data.rng import RandomState, seed_all
from ddpforge.errors import PluginError
from ddpforge.features.shard_reader import ShardedStream, check_parts
from ddpforge.features.sources import ShardedSources
from ddpforge.interfaces import ShardedDataset, mix
from ddpforge.training.features import Assembled, Feature

__all__ = ["IterableData", "Stream", "loader_in"]

_PASS = 0x9A55  # a different seed for reading a stream than for its batches
_DEPTH = 8


def loader_in(data: Any, depth: int = _DEPTH) -> Any:
    """Returns `data` if it is a torch DataLoader, or one in its attributes, up to `depth` levels deep; else None."""
    if isinstance(data, DataLoader):
        return data
    if depth == 0 or isinstance(data, type):
        return None
    if isinstance(data, list | tuple):
        parts: Iterable[Any] = data[:_DEPTH]  # a list of samples may be long
    else:
        parts = (data if isinstance(data, dict) else getattr(data, "__dict__", {})).values()
    found = (loader_in(part, depth - 1) for part in list(parts))
    return next((loader for loader in found if loader is not None), None)


class Stream(IterableDataset[MicroBatch]):
    """Micro-batches of a rank from an iterable dataset; every rank and loader process reads all and keeps its part.

    Because each process reads everything, this is exact for any iterable and any number of ranks and loader processes:
    no sample is lost or counts twice. All processes read with the same random numbers: the RNGs are seeded from (seed,
    epoch) before each pass, and batches use a separate RNG state. Ranks compare the samples that they read by
    `MicroBatch.read`, a hash of the first sample of every step.
    """

    def __init__(self, data: Any, terms: AssignmentTerms, _: object, start: int, stop_after_epoch: bool) -> None:
        self.data, self.terms = data, terms
        self.start, self.stop_after_epoch = start, stop_after_epoch
        self.collate = collate_of(data, terms.keys)

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            compat.hide_worker()  # otherwise the dataset might divide itself among the loader processes
        turn = count()  # number of the micro-batch: each loader process yields every `workers`-th one

        read = 0
        for step, samples in enumerate(islice(self._steps(), self.start, None), self.start):
            read = int(digest([read, samples[0]])[:5], 16) or 1  # only 20 bits, see `Fingerprint`
            micro = self.terms.share.deal(len(samples))
            for number, part in enumerate(micro):
                if next(turn) % workers == mine:
                    seed_all(mix(self.terms.seed, step, part.start))
                    kept = [samples[place] for place in part] or [samples[0]]
                    whose = self.terms.share.whose(number, len(micro))
                    last = number + 1 == len(micro)
                    places = self._places(step, part) if self.stop_after_epoch else None
                    yield MicroBatch(self.collate(kept), len(part), len(samples), last, *whose, read, places)

    def _places(self, step: int, part: range) -> NDArray[Any]:
        """Returns the places of samples in the stream, in its first epoch."""
        return np.array(part or [0]) + step * self.terms.global_batch

    def _steps(self) -> Iterator[Sequence[Any]]:
        """Yields the samples of every step, over all ranks."""
        for epoch in count():
            stream, empty = _Pass(self.data, epoch, mix(self.terms.seed, _PASS, epoch)), True
            while samples := stream.read(self.terms.global_batch):
                stream.reject_another_length()
                if len(samples) < self.terms.global_batch and self.terms.drop_last:
                    break
                empty = False
                yield samples
            stream.reject_another_length(ended=True)
            if empty:
                too_few = "less than one batch" if self.terms.drop_last else "no sample"
                raise PluginError(
                    f"the iterable dataset {type(self.data).__name__} yields {too_few}",
                    hints=["if this is not the first epoch: `__iter__` must start from the beginning at every call"],
                )
            if self.stop_after_epoch:
                return


class _Pass:
    """One pass over an iterable dataset, with a separate RNG state unless its `random` is False."""

    def __init__(self, data: Any, epoch: int, seed: int) -> None:
        if hasattr(data, "set_epoch"):
            data.set_epoch(epoch)
        self._data, self._epoch, self._count = data, epoch, 0
        self._length: int | None = len(data) if hasattr(data, "__len__") else None
        self._state = RandomState(seed) if getattr(data, "random", True) else None
        self._samples = iter(data)
        if self._state:
            self._state.keep()

    def read(self, number: int) -> list[Any]:
        """Returns the next `number` samples, fewer at the end."""
        if self._state is None:
            samples = list(islice(self._samples, number))
        else:
            self._state.resume()
            samples = list(islice(self._samples, number))
            self._state.keep()
        self._count += len(samples)
        return samples

    def reject_another_length(self, *, ended: bool = False) -> None:
        """Raises PluginError if the number of samples differs from `__len__` of the dataset.

        After sample number `__len__` it reads one more, because the run may end there.
        """
        # The length of a run in epochs is computed from `__len__`: with another number the run would be wrong.
        if self._length is None or (self._count < self._length and not ended):
            return
        if self._count == self._length and not self.read(1):
            return
        found = f"it yielded {self._count}" if self._count < self._length else "it yielded more"
        raise PluginError(
            f"the iterable dataset {type(self._data).__name__} has {self._length} samples according to its `__len__`, "
            f"but in epoch {self._epoch} (0 is the first) {found}",
            hints=[
                "`__len__` must return the number of samples of a pass, over all ranks and loader processes; or remove "
                "it and set train.length in steps"
            ],
        )


class IterableData(Feature):
    """Iterable datasets: their readers, and a fingerprint of the samples that a rank has read, which ranks compare."""

    _read = 0  # fingerprint of the samples up to the newest micro-batch; 0 if it comes from data with a length

    @staticmethod
    def reader(data: Any) -> Reader | None:
        """Returns the reader of an iterable dataset; raises PluginError for a loader, and for parts without sizes."""
        if is_stream(data) and (loader := loader_in(data)) is not None:
            inside = "" if loader is data else f", which {type(data).__name__} reads,"
            raise PluginError(
                f"a {type(loader).__name__}{inside} is a loader, not a dataset: it would choose batches and order "
                "itself, the same in every epoch",
                hints=["give the dataset that the loader reads; set batches, order and workers in the recipe"],
            )
        if isinstance(data, ShardedDataset):
            check_parts(data)
        if isinstance(data, ShardedDataset | ShardedSources):
            return ShardedStream
        return Stream if is_stream(data) else None

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature if a dataset is a stream."""
        return cls() if any(map(is_stream, run.parts.data.values())) else None

    @override
    def after_draw(self, first: MicroBatch) -> None:
        self._read = first.read

    @override
    def totals(self) -> dict[str, float]:
        if not self._read:
            return {}
        # If all ranks agree, the mean of the squares is the square of the mean. Squares of 20-bit numbers add up
        # exactly in float64, on up to 8,192 ranks.
        return {"?read1": self._read, "?read2": self._read**2}

    def take(self, means: dict[str, float], step: int) -> None:
        """Raises PluginError if ranks have read different samples."""
        self._read = 0
        mean, square = means.pop("?read1", 0.0), means.pop("?read2", 0.0)
        if mean**2 != square:
            raise PluginError(
                f"ranks read different samples from the iterable dataset, by step {step}: some samples would be "
                "used twice and others never",
                hints=[
                    "it must yield the same samples in the same order on every rank: do not shard it by rank, and do "
                    "not order by set or hash",
                    "shuffle with the global generator of python, numpy or torch (seeded equally on all ranks before "
                    "each pass), or with one seeded from the epoch that `set_epoch` receives",
                ],
            )
