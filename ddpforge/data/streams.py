"""Iterable datasets: what one is, and how it is dealt out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddpforge import compat
from ddpforge.data.collating import collate_of
from ddpforge.data.nests import digest
from ddpforge.data.order import MicroBatch, Terms
from ddpforge.data.randomness import RandomState, seed_all
from ddpforge.errors import PluginError
from ddpforge.interfaces import mix

__all__ = ["Stream", "is_stream", "loader_in"]

_PASS = 0x9A55  # keeps the random numbers of a stream apart from those of its batches
_DEPTH = 8


def is_stream(data: Any) -> bool:
    """True for an iterable dataset; torch's own base class of them has a `__getitem__`, which only raises."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


def loader_in(data: Any, depth: int = _DEPTH) -> Any:
    """The torch DataLoader that `data` is or reads, through at most `depth` other objects; None if there is none."""
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
    """An iterable dataset, dealt out: every rank and every loader process reads it all and keeps its own part.

    Reading everything is what makes it exact for any iterable: no sample twice, none lost, no padding, any number
    of ranks and loader processes. All of them draw the same random numbers while they read: the generators are
    seeded from (seed, epoch) before each pass, and batches have a state of their own. What was read is compared over
    ranks by `MicroBatch.read`, which is made of the first sample of every step.
    """

    def __init__(self, data: Any, terms: Terms, start: int, stop_after_epoch: bool) -> None:
        self.data, self.terms = data, terms
        self.start, self.stop_after_epoch = start, stop_after_epoch
        self.collate = collate_of(data)

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        if worker:
            compat.hide_worker()  # a dataset that knew it would deal itself out among the processes
        turn = count()  # loader processes take turns, micro-batch by micro-batch

        read = 0
        for step, samples in enumerate(islice(self._steps(), self.start, None), self.start):
            read = int(digest([read, samples[0]])[:5], 16) or 1  # 20 bits: see `Fingerprint` for why so few
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
        """The places of samples in the stream, in its first epoch."""
        return np.array(part or [0]) + step * self.terms.global_batch

    def _steps(self) -> Iterator[Sequence[Any]]:
        """The samples of every step, over all ranks."""
        for epoch in count():
            stream, empty = _Pass(self.data, epoch, mix(self.terms.seed, _PASS, epoch)), True
            while samples := stream.read(self.terms.global_batch):
                stream.refuse_another_length()
                if len(samples) < self.terms.global_batch and self.terms.drop_last:
                    break
                empty = False
                yield samples
            stream.refuse_another_length(ended=True)
            if empty:
                too_few = "less than one batch" if self.terms.drop_last else "no sample"
                raise PluginError(
                    f"the iterable dataset {type(self.data).__name__} holds {too_few}",
                    hints=["if it did before: `__iter__` must begin anew whenever it is called"],
                )
            if self.stop_after_epoch:
                return


class _Pass:
    """One pass over an iterable dataset, with random numbers of its own unless its `random` is False."""

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
        """Returns the next samples, fewer at the end."""
        if self._state is None:
            samples = list(islice(self._samples, number))
        else:
            self._state.resume()
            samples = list(islice(self._samples, number))
            self._state.keep()
        self._count += len(samples)
        return samples

    def refuse_another_length(self, *, ended: bool = False) -> None:
        """Raises PluginError where the data has another number of samples than its `__len__` promises.

        The run's length is counted by that promise: another number would train another number of epochs. At the last
        sample that was promised it reads one more, as a run may end there.
        """
        if self._length is None or (self._count < self._length and not ended):
            return
        if self._count == self._length and not self.read(1):
            return
        found = f"{self._count} of them came" if self._count < self._length else "there are more"
        raise PluginError(
            f"the iterable dataset {type(self._data).__name__} promises {self._length} samples by its `__len__`, and "
            f"in epoch {self._epoch} (0 is the first) {found}",
            hints=[
                "let `__len__` be the number of samples of a pass, over all ranks and loader processes, or leave it "
                "out and give train.length in steps"
            ],
        )
