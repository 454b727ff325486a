"""The samples that a rank sees, as arithmetic on the step.

An order (see `interfaces.BatchSampler`) says which samples form a step; the number of ranks decides who computes a
sample, never that. Nothing is stored for a resume, and nothing is padded, repeated or lost at uneven ends.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddpforge.errors import PluginError
from ddpforge.interfaces import BatchSampler, EpochBatchSampler

__all__ = ["Dealer", "Even", "MicroBatch", "RankShare", "Request", "Terms", "end_of_epochs"]

_BLOCK = 1 << 12  # samples whose order is computed in one vectorised go
_LONGEST = 1 << 40  # steps
_FEW = 100  # steps of an order whose sizes only it knows


class RankShare(NamedTuple):
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

    def fewest(self, samples: int) -> int:
        """The size of the smallest micro-batch that any rank gets of a step of `samples`."""
        return min(len(part) for rank in range(self.ranks) for part in self._replace(rank=rank).deal(samples))

    def whose(self, number: int, micro_batches: int) -> tuple[int, int]:
        """Of micro-batch `number` among this rank's `micro_batches`: its shard, and its number in there."""
        shard, within = divmod(number, micro_batches // len(self.shards))
        return self.shards[shard], within


class Request(NamedTuple):
    """The samples of one micro-batch, before they are fetched."""

    ids: list[int]
    step: int
    epoch: int
    samples: int
    step_samples: int
    last: bool
    shard: int
    number: int


class MicroBatch(NamedTuple):
    """The input of one forward pass.

    `samples` is 0 for a stand-in: at a ragged end a rank may have nothing left, yet must take part in the forward
    and backward passes; its data is then a real sample whose loss is multiplied by zero.
    """

    data: Any
    samples: int
    step_samples: int  # samples of the whole step, over all ranks
    last: bool  # this rank's last micro-batch of the step
    shard: int  # of the step's samples, see `RankShare`
    number: int  # within the shard
    read: int = 0  # of a stream: a fingerprint of what this rank has read of it, see `streams.Stream`
    places: NDArray[Any] | None = None  # in evaluation: of each sample in `data` within its dataset
    items: Any = None  # that the loss sums over (a number or a 0-d tensor), where they have been counted


def end_of_epochs(order: BatchSampler, epochs: int) -> int | None:
    """The number of steps that the first `epochs` of an order take, by bisection; None where it tells no epochs."""
    if order.steps_per_epoch is not None or type(order).epoch is BatchSampler.epoch:
        return None
    found = bisect_left(range(_LONGEST), epochs, key=order.epoch)
    return found if found < _LONGEST else None


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms on which samples are dealt to one rank, whatever the data."""

    global_batch: int
    share: RankShare
    seed: int
    drop_last: bool


class Placed(Protocol):
    """An order that can be asked for any places of any steps, as `interfaces.EpochBatchSampler`."""

    def size(self, step: int) -> int:
        """The number of samples in a step."""

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The samples at the given places within the given steps."""


class _Whole:
    """An order that says whole steps only; each is asked for once, and held to be one."""

    def __init__(self, order: BatchSampler) -> None:
        self._order = order
        self._asked: dict[int, NDArray[Any]] = {}

    def size(self, step: int) -> int:
        """The number of samples in a step, which is kept until its places are asked for."""
        ids = np.asarray(self._order(step))
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            raise PluginError(
                f"the sampler {type(self._order).__name__} gave {'nothing' if not ids.size else _form(ids)} for step "
                f"{step} (0 is the first)",
                hints=["a sampler returns the indices of a step's samples: a row of whole numbers, at least one"],
            )
        self._asked[step] = ids
        return len(ids)

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Takes the places out of the steps."""
        found: NDArray[Any] = self._asked.pop(int(steps[0]))[places]  # it is asked for one step at a time
        return found


def _form(ids: NDArray[Any]) -> str:
    return f"an array of shape {list(ids.shape)} of {ids.dtype}"


@dataclass(frozen=True, kw_only=True)
class Dealer:
    """Deals the steps of an order to one rank: its micro-batches, in the order of training or of evaluation."""

    order: BatchSampler
    samples: int  # of the dataset
    terms: Terms

    def sizes(self, steps: int | None) -> tuple[int, int]:
        """The smallest number of samples in a full step, and in an epoch's last, of a run of `steps`."""
        if not isinstance(self.order, EpochBatchSampler):
            whole = _Whole(self.order)
            smallest = min(whole.size(step) for step in range(min(_FEW, steps or _FEW)))
            return smallest, smallest
        last = self.order.steps_per_epoch - 1
        if steps is not None and steps <= last:
            return self.terms.global_batch, self.terms.global_batch
        return self.terms.global_batch, self.order.size(last)

    def requests(self, start: int, stop: int | None) -> Iterator[Request]:
        """From step `start` up to `stop`; for ever when it is None."""
        placed, most = self._placed()
        first, block = start, 1  # of a short run, or where one batch is looked at, few are worked out
        while stop is None or first < stop:
            end = first + block if stop is None else min(stop, first + block)
            yield from self._block(placed, range(first, end))
            first, block = end, min(2 * block, most)

    def _placed(self) -> tuple[Placed, int]:
        """The order, to be asked for places; and for how many steps at once."""
        if not isinstance(self.order, EpochBatchSampler):
            return _Whole(self.order), 1
        return self.order, max(1, _BLOCK * self.terms.share.ranks // self.terms.global_batch)

    def _block(self, placed: Placed, steps: range) -> Iterator[Request]:
        """The requests of several steps, whose sample order is worked out in one go."""
        plan: list[tuple[range, tuple[int, int, int, int, bool, int, int]]] = []  # places, and the rest of a request
        share = self.terms.share
        for step in steps:
            epoch, size = self.order.epoch(step), placed.size(step)
            micro = share.deal(size)
            for number, part in enumerate(micro):
                places = part or range(1)  # a stand-in: the first sample of the step
                whose = share.whose(number, len(micro))
                plan.append((places, (step, epoch, len(part), size, number + 1 == len(micro), *whose)))

        ids = self._ids(placed, [places for places, _ in plan], [rest[0] for _, rest in plan])
        cursor = 0
        for places, rest in plan:
            yield Request(ids[cursor : cursor + len(places)], *rest)
            cursor += len(places)

    def _ids(self, placed: Placed, places: list[range], steps: list[int]) -> list[int]:
        flat = np.concatenate([np.arange(part.start, part.stop, dtype=np.uint64) for part in places])
        found = placed.ids(np.repeat(np.array(steps, dtype=np.uint64), [len(part) for part in places]), flat)
        if (outside := np.flatnonzero((found < 0) | (found >= self.samples))).size:
            raise PluginError(
                f"the sampler {type(self.order).__name__} asks for sample {found[outside[0]]} by step {steps[-1]}, and "
                f"the data has {self.samples}",
                hints=["a sampler returns indices of samples: 0 up to, not including, the length of the data"],
            )
        ids: list[int] = found.tolist()
        return ids


class Even(EpochBatchSampler):
    """Every sample once, in the order of the data, in batches of nearly the same size and of `global_batch` at most.

    So an evaluation compares the same samples with each other on any number of ranks, and leaves none for a small end.
    """

    once = True

    def __init__(self, data: Any, global_batch: int) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=False)

    @property
    def smallest(self) -> int:
        """The number of samples in the smallest batch."""
        return self.places // self.steps_per_epoch

    def size(self, step: int) -> int:
        """The number of samples in a batch."""
        first, end = (edge * self.places // self.steps_per_epoch for edge in (step, step + 1))
        return end - first

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The samples at the given places within the given batches."""
        found: NDArray[Any] = steps.astype("int64") * self.places // self.steps_per_epoch + places.astype("int64")
        return found

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The places themselves."""
        return places
