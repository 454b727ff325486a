"""Which samples a rank sees, as arithmetic on the step, and how they are fetched and moved to the device.

Step `s` of an epoch trains on places `[s·G, (s+1)·G)` of that epoch's order, G being the global batch. The order is
one permutation per epoch, a pure function of (seed, epoch); the number of ranks decides who computes a sample, never
which samples form a step. Nothing is stored for a resume, and nothing is padded, repeated or lost at uneven ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

from ddpforge.errors import PluginError
from ddpforge.signals import leave_stopping_to_the_rank

__all__ = ["Batches", "MicroBatch", "Share", "mix", "open_data", "permute", "seed_all", "to_device"]

_BLOCK = 1 << 12  # samples whose order is computed in one vectorised go
_ROUNDS = 6
_MASK = (1 << 64) - 1


# ---------------------------------------------------------------------------------------------- randomness
def mix(*parts: int) -> int:
    """One well-spread 63-bit seed out of several integers (the finaliser of splitmix64, Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seeds python's, numpy's and torch's generators, and that of `device` where it has its own.

    Reaches the generators directly: `torch.manual_seed` also visits every backend that might exist, which costs a
    hundred times as much and would be felt at every step.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


def permute(places: NDArray[np.uint64], epochs: NDArray[np.uint64], samples: int, seed: int) -> NDArray[np.uint64]:
    """The samples at the given places of the given epochs' orders (two arrays of one shape), in O(1) memory.

    For each epoch this is a permutation of `range(samples)`: an alternating Feistel network over the next power of
    two, walked until it lands inside the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    Place 10⁹ costs what place 0 costs.
    """
    bits = max(2, (samples - 1).bit_length())
    low = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << n) - 1) for n in (bits // 2, bits - bits // 2))
    keys = [_scramble(epochs + np.uint64(mix(seed, turn))) for turn in range(_ROUNDS)]

    def encrypt(block: NDArray[np.uint64], keys: list[NDArray[np.uint64]]) -> NDArray[np.uint64]:
        left, right = block >> low, block & low_mask
        for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
            left = left ^ (_scramble(right ^ key_left) & high_mask)
            right = right ^ (_scramble(left ^ key_right) & low_mask)
        return (left << low) | right

    ids = encrypt(places, keys)
    while (outside := np.flatnonzero(ids >= samples)).size:
        ids[outside] = encrypt(ids[outside], [key[outside] for key in keys])
    return ids


def _scramble(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A bijection of 64-bit words whose every output bit depends on every input bit (splitmix64, shortened)."""
    value = (value + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return value >> np.uint64(32)


# ---------------------------------------------------------------------------------------------- dealing
class Share(NamedTuple):
    """One rank's part in the steps of a run.

    Samples are dealt to shards, and shards to ranks: `elastic` of them, a multiple of the ranks, or as many as there
    are ranks. What a shard is dealt depends on the number of shards alone.
    """

    rank: int
    ranks: int
    micro_batch: int
    elastic: int | None = None

    @property
    def shards(self) -> range:
        """The numbers of this rank's shards."""
        each = (self.elastic or self.ranks) // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def deal(self, samples: int) -> list[range]:
        """Cuts the `samples` of one step into this rank's micro-batches, as ranges of places within the step.

        Every shard gets the same number of micro-batches, because under sharding each forward pass is collective;
        their sizes differ by at most one sample, and may be zero at a ragged end.
        """
        total = self.elastic or self.ranks
        parts = math.ceil(math.ceil(samples / total) / self.micro_batch)
        found = []
        for shard in self.shards:
            first, end = (edge * samples // total for edge in (shard, shard + 1))
            cuts = [first + part * (end - first) // parts for part in range(parts + 1)]
            found += [range(a, b) for a, b in pairwise(cuts)]
        return found

    def whose(self, number: int, micro_batches: int) -> tuple[int, int]:
        """Of micro-batch `number` among this rank's `micro_batches`: its shard, and its number in there."""
        shard, within = divmod(number, micro_batches // len(self.shards))
        return self.shards[shard], within


class Request(NamedTuple):
    """The samples of one micro-batch, before they are fetched."""

    ids: list[int]
    epoch: int
    samples: int
    step_samples: int
    last: bool
    shard: int
    number: int


class MicroBatch(NamedTuple):
    """What one forward pass gets.

    `samples` is 0 for a stand-in: at a ragged end a rank may have nothing left, yet must take part in the forward
    and backward passes; its data is then a real sample whose loss is multiplied by zero.
    """

    data: Any
    samples: int
    step_samples: int  # samples of the whole step, over all ranks
    last: bool  # this rank's last micro-batch of the step
    shard: int  # of the step's samples, see `Share`
    number: int  # within the shard


@dataclass(frozen=True, kw_only=True)
class _Order:
    """The micro-batches of one rank in the order of training (or, without shuffling, of evaluation)."""

    samples: int
    global_batch: int
    share: Share
    seed: int
    shuffle: bool
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        full, rest = divmod(self.samples, self.global_batch)
        return full + (rest > 0 and not self.drop_last)

    def requests(self, start: int, stop: int | None) -> Iterator[Request]:
        """From step `start` up to `stop`; for ever when it is None."""
        block = max(1, _BLOCK * self.share.ranks // self.global_batch)
        for first in count(start, block):
            end = first + block if stop is None else min(stop, first + block)
            yield from self._block(range(first, end))
            if end == stop:
                return

    def _block(self, steps: range) -> Iterator[Request]:
        """The requests of several steps, whose sample order is worked out in one go."""
        plan: list[tuple[range, tuple[int, int, int, bool, int, int]]] = []  # places, and the rest of a request
        for step in steps:
            epoch, turn = divmod(step, self.steps_per_epoch)
            begin = turn * self.global_batch
            size = min(self.global_batch, self.samples - begin)
            micro = self.share.deal(size)
            for number, part in enumerate(micro):
                places = part or range(1)  # a stand-in: the first sample of the step
                shifted = range(begin + places.start, begin + places.stop)
                whose = self.share.whose(number, len(micro))
                plan.append((shifted, (epoch, len(part), size, number + 1 == len(micro), *whose)))

        ids = self._ids([places for places, _ in plan], [rest[0] for _, rest in plan])
        cursor = 0
        for places, rest in plan:
            yield Request(ids[cursor : cursor + len(places)], *rest)
            cursor += len(places)

    def _ids(self, places: list[range], epochs: list[int]) -> list[int]:
        flat = np.concatenate([np.arange(part.start, part.stop, dtype=np.uint64) for part in places])
        if self.shuffle:
            sizes = [len(part) for part in places]
            flat = permute(flat, np.repeat(np.array(epochs, dtype=np.uint64), sizes), self.samples, self.seed)
        ids: list[int] = flat.tolist()
        return ids


# ---------------------------------------------------------------------------------------------- fetching
class _Fetcher(Dataset[MicroBatch]):
    """A dataset whose items are whole micro-batches; runs in the training process or in a loader's."""

    def __init__(self, data: Any, seed: int) -> None:
        self.data = data
        self.seed = seed
        self.random: bool = getattr(data, "random", True)
        self.batched = hasattr(data, "__getitems__")
        self.collate = getattr(data, "collate", default_collate)

    def __getitem__(self, request: Request) -> MicroBatch:
        fetched = self._batch(request) if self.batched else [self._sample(request.epoch, i) for i in request.ids]
        _, _, samples, step_samples, last, shard, number = request
        return MicroBatch(self.collate(fetched), samples, step_samples, last, shard, number)

    def _batch(self, request: Request) -> Any:
        if self.random:
            seed_all(mix(self.seed, request.epoch, request.ids[0]))
        return self.data.__getitems__(request.ids)

    def _sample(self, epoch: int, index: int) -> Any:
        if self.random:
            seed_all(mix(self.seed, epoch, index))
        return self.data[index]


class _Requests(Iterable[Request]):
    """A DataLoader's sampler must be an object that can be iterated again, for every evaluation."""

    def __init__(self, order: _Order, start: int, stop: int | None) -> None:
        self.bounds = (start, stop)
        self.order = order

    def __iter__(self) -> Iterator[Request]:
        return self.order.requests(*self.bounds)


class _Stream(IterableDataset[MicroBatch]):
    """An iterable dataset, dealt out: every rank and every loader process reads it all and keeps its own part.

    Reading everything is what makes it exact for any iterable: no sample twice, none lost, no padding, any number
    of ranks and loader processes.
    """

    def __init__(self, data: Any, order: _Order, start: int, stop_after_epoch: bool) -> None:
        self.data, self.order = data, order
        self.start, self.stop_after_epoch = start, stop_after_epoch
        self.collate = getattr(data, "collate", default_collate)

    def __iter__(self) -> Iterator[MicroBatch]:
        worker = get_worker_info()
        mine, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        turn = count()  # loader processes take turns, micro-batch by micro-batch

        for step, samples in enumerate(islice(self._steps(), self.start, None), self.start):
            micro = self.order.share.deal(len(samples))
            for number, part in enumerate(micro):
                if next(turn) % workers == mine:
                    seed_all(mix(self.order.seed, step, part.start))
                    kept = [samples[place] for place in part] or [samples[0]]
                    whose = self.order.share.whose(number, len(micro))
                    yield MicroBatch(self.collate(kept), len(part), len(samples), number + 1 == len(micro), *whose)

    def _steps(self) -> Iterator[Sequence[Any]]:
        """The samples of every step, over all ranks."""
        for epoch in count():
            if hasattr(self.data, "set_epoch"):
                self.data.set_epoch(epoch)
            stream, empty = iter(self.data), True
            while samples := list(islice(stream, self.order.global_batch)):
                if len(samples) < self.order.global_batch and self.order.drop_last:
                    break
                empty = False
                yield samples
            if self.stop_after_epoch:
                return
            if empty:
                raise PluginError(f"the iterable dataset {type(self.data).__name__} holds less than one batch")


@dataclass(frozen=True)
class Batches:
    """The micro-batches of one rank. `steps_per_epoch` is None for a stream that does not know its length."""

    steps_per_epoch: int | None
    _data: Any
    _order: _Order
    _workers: int
    _prefetch: int
    _pin: bool

    def training(self, start: int) -> Iterator[MicroBatch]:
        """From step `start` on, without end, epoch after epoch."""
        return iter(self._loader(start, one_epoch=False))

    def evaluation(self) -> Iterable[MicroBatch]:
        """All samples once, in their own order."""
        return self._loader(0, one_epoch=True)

    def _loader(self, start: int, *, one_epoch: bool) -> Iterable[MicroBatch]:
        options: dict[str, Any] = {"num_workers": self._workers, "pin_memory": self._pin, "batch_size": None}
        if self._workers:
            options |= {"prefetch_factor": self._prefetch, "persistent_workers": True}
            options["worker_init_fn"] = leave_stopping_to_the_rank()

        if _is_stream(self._data):
            return DataLoader(_Stream(self._data, self._order, start, one_epoch), **options)

        requests = _Requests(self._order, start, self._order.steps_per_epoch if one_epoch else None)
        fetcher = _Fetcher(self._data, self._order.seed)
        if not self._workers and not self._pin:
            return _Mapped(fetcher, requests)
        return DataLoader(fetcher, sampler=requests, **options)


class _Mapped(Iterable[MicroBatch]):
    """What a DataLoader without loader processes does, less its bookkeeping per batch."""

    def __init__(self, fetcher: _Fetcher, requests: _Requests) -> None:
        self.fetcher, self.requests = fetcher, requests

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.fetcher.__getitem__, self.requests)


def _is_stream(data: Any) -> bool:
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__")


def open_data(
    data: Any,
    *,
    global_batch: int,
    share: Share,
    seed: int,
    shuffle: bool,
    drop_last: bool,
    workers: int,
    prefetch: int,
    pin: bool,
) -> Batches:
    """Deals `data` (see `interfaces.Data`) out to this rank; raises PluginError for what is not a dataset."""
    if not _is_stream(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise PluginError(
            f"{type(data).__name__} is not a dataset: it has neither __len__ and __getitem__ nor __iter__",
            hints=["see `ddpforge.interfaces.Data` for what a dataset offers"],
        )

    samples = len(data) if hasattr(data, "__len__") else None
    order = _Order(
        samples=samples or 0,
        global_batch=global_batch,
        share=share,
        seed=seed,
        shuffle=shuffle,
        drop_last=drop_last,
    )
    steps = None if samples is None else order.steps_per_epoch
    if steps == 0:
        raise PluginError(
            f"{type(data).__name__} holds {samples} samples, less than one global batch of {global_batch}",
            hints=['lower train.global_batch, or set train.last_batch = "keep"' if samples else "the dataset is empty"],
        )
    return Batches(steps, data, order, workers, prefetch, pin)


def to_device(batch: Any, device: torch.device) -> Any:
    """The same nest of tensors on `device`; copies from pinned memory do not wait."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
