"""Computes the samples of a rank from the step number alone.

An order (see `interfaces.BatchSampler`) defines the samples of each step. They do not depend on the number of ranks,
which only decides the rank that computes a sample. A resume needs no stored state. At an incomplete last step no sample
counts twice or is lost.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ddpforge.data.collating import BatchKeys
from ddpforge.errors import PluginError
from ddpforge.interfaces import BatchSampler, EpochBatchSampler

__all__ = ["AssignmentTerms", "BatchAssigner", "Divider", "Even", "MicroBatch", "RankShare", "Request", "end_of_epochs"]

_BLOCK = 1 << 12  # samples whose order is computed in one vectorized call
_LONGEST = 1 << 40  # maximum steps in the bisection
_FEW = 100  # steps of an order without epochs whose sizes are tried


class Divider(Protocol):
    """Divides the samples of a step into micro-batches by their lengths."""

    def divide(self, ids: NDArray[Any], mine: range, shards: int, *, most: int) -> list[tuple[NDArray[Any], int]]:
        """Returns the micro-batches of a step with the samples `ids`: places in the step, and their number.

        Only those of the shards `mine`, of `shards` shards, which all have the same number of micro-batches; each has
        at most `most` samples. A padding sample has the number 0.
        """


class RankShare(NamedTuple):
    """Share of one rank in the samples of each step.

    Samples are divided among virtual ranks, and these among ranks. There are `virtual_ranks`, a multiple of the number
    of ranks, or one per rank. The samples of a virtual rank depend only on the number of virtual ranks.
    """

    rank: int
    ranks: int
    micro_batch: int
    virtual_ranks: int | None = None

    @property
    def own_virtual_ranks(self) -> range:
        """Returns the numbers of this rank's virtual ranks."""
        each = (self.virtual_ranks or self.ranks) // self.ranks
        return range(self.rank * each, (self.rank + 1) * each)

    def deal(self, samples: int) -> list[range]:
        """Returns this rank's micro-batches of a step with `samples` samples, as ranges of places within the step.

        Every virtual rank gets the same number of micro-batches. Their sizes differ by at most one sample, and may be
        zero in an incomplete step.
        """
        # The same number, because with a sharded model each forward pass is collective.
        total = self.virtual_ranks or self.ranks
        parts = math.ceil(math.ceil(samples / total) / self.micro_batch)
        found = []
        for one in self.own_virtual_ranks:
            first, end = (edge * samples // total for edge in (one, one + 1))
            cuts = [first + part * (end - first) // parts for part in range(parts + 1)]
            found += [range(a, b) for a, b in pairwise(cuts)]
        return found

    def divide(self, ids: NDArray[Any], limit: Divider) -> list[tuple[NDArray[Any], int]]:
        """Returns this rank's micro-batches of a step with the samples `ids`, divided by their lengths.

        Each is an array of places within the step, and the number of its samples: 0 for a padding sample.
        """
        return limit.divide(ids, self.own_virtual_ranks, self.virtual_ranks or self.ranks, most=self.micro_batch)

    def fewest(self, samples: int) -> int:
        """Returns the size of the smallest micro-batch of any rank in a step of `samples` samples."""
        return min(len(part) for rank in range(self.ranks) for part in self._replace(rank=rank).deal(samples))

    def whose(self, number: int, micro_batches: int) -> tuple[int, int]:
        """Returns the virtual rank of micro-batch `number` of this rank's `micro_batches`, and its number within it."""
        place, within = divmod(number, micro_batches // len(self.own_virtual_ranks))
        return self.own_virtual_ranks[place], within


class Request(NamedTuple):
    """Samples of one micro-batch, before they are fetched."""

    ids: list[int]
    step: int
    epoch: int
    samples: int
    step_samples: int
    last: bool
    shard: int
    number: int
    earlier: Sequence[int] = ()  # how often each sample comes before in the step; empty if none does


class MicroBatch(NamedTuple):
    """Input of one forward pass.

    `samples` is 0 for a padding sample. In an incomplete step a rank may have no samples, but must take part in the
    forward and backward passes. Its data is then a real sample, and its loss is multiplied by zero.
    """

    data: Any
    samples: int
    step_samples: int  # samples of the whole step, over all ranks
    last: bool  # this rank's last micro-batch of the step
    shard: int  # the virtual rank, see `RankShare`
    number: int  # within the virtual rank
    read: int = 0  # for iterable datasets: fingerprint of the samples read so far
    places: NDArray[Any] | None = None  # in evaluation: index of each sample of `data` in the dataset
    items: Any = None  # number of items that the loss sums over (number or 0-d tensor), if counted


def end_of_epochs(order: BatchSampler, epochs: int) -> int | None:
    """Returns the number of steps of the first `epochs` epochs, by bisection.

    For orders with epochs of different lengths. Returns None if all epochs are equal or the order has no epochs.
    """
    if order.steps_per_epoch is not None or type(order).epoch is BatchSampler.epoch:
        return None
    found = bisect_left(range(_LONGEST), epochs, key=order.epoch)
    return found if found < _LONGEST else None


@dataclass(frozen=True, kw_only=True)
class AssignmentTerms:
    """Settings for the division of samples, independent of the dataset."""

    global_batch: int
    share: RankShare
    seed: int
    drop_last: bool
    keys: BatchKeys = field(default_factory=BatchKeys)  # of a batch that is a mapping
    limit: Divider | None = None  # divides each step by the lengths of samples; not for streams


class SampleBlock(Protocol):
    """Order that returns the samples at any places of any steps, such as `interfaces.EpochBatchSampler`."""

    def size(self, step: int) -> int:
        """Returns the number of samples in a step."""

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at the given places within the given steps."""


class _Whole:
    """Adapter for an order that returns only whole steps; calls it once per step and checks the result."""

    def __init__(self, order: BatchSampler) -> None:
        self._order = order
        self._asked: dict[int, NDArray[Any]] = {}

    def size(self, step: int) -> int:
        """Returns the number of samples in a step; keeps the samples for the call of `ids`."""
        ids = np.asarray(self._order(step))
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
            form = f"an array of shape {list(ids.shape)} of {ids.dtype}" if ids.size else "nothing"
            raise PluginError(
                f"the sampler {type(self._order).__name__} gave {form} for step {step} (0 is the first)",
                hints=["a sampler must return the indices of a step's samples: a 1-d array of integers, at least one"],
            )
        self._asked[step] = ids
        return len(ids)

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at the given places of one step."""
        found: NDArray[Any] = self._asked.pop(int(steps[0]))[places]  # callers pass one step at a time
        return found


@dataclass(frozen=True, kw_only=True)
class BatchAssigner:
    """Divides the steps of an order among ranks: builds the requests of one rank's micro-batches."""

    order: BatchSampler
    samples: int  # length of the dataset
    terms: AssignmentTerms

    def fewest(self, steps: int | None) -> tuple[int, int]:
        """Returns the smallest micro-batch of any rank, in a full step and in an epoch's last step of a run of `steps`.

        With a limit it is 1: the lengths of samples decide.
        """
        if self.terms.limit:
            return 1, 1
        full, last = map(self.terms.share.fewest, self.sizes(steps))
        return full, last

    def sizes(self, steps: int | None) -> tuple[int, int]:
        """Returns the smallest number of samples of a full step, and of an epoch's last step, in a run of `steps`."""
        if not isinstance(self.order, EpochBatchSampler):
            whole = _Whole(self.order)
            smallest = min(whole.size(step) for step in range(min(_FEW, steps or _FEW)))
            return smallest, smallest
        last = self.order.steps_per_epoch - 1
        if steps is not None and steps <= last:
            return self.terms.global_batch, self.terms.global_batch
        return self.terms.global_batch, self.order.size(last)

    def requests(self, start: int, stop: int | None) -> Iterator[Request]:
        """Yields the requests from step `start` to `stop` (exclusive); without end if it is None."""
        placed: SampleBlock
        if isinstance(self.order, EpochBatchSampler):
            placed, most = self.order, max(1, _BLOCK * self.terms.share.ranks // self.terms.global_batch)
        else:
            placed, most = _Whole(self.order), 1  # step in one call
        first, block = start, 1  # small at first, because short runs need only few
        while stop is None or first < stop:
            end = first + block if stop is None else min(stop, first + block)
            # Whole steps show how often a sample comes in one of them.
            stepwise = self.terms.limit or not self.order.once
            yield from (self._stepwise if stepwise else self._block)(placed, range(first, end))
            first, block = end, min(2 * block, most)

    def _block(self, placed: SampleBlock, steps: range) -> Iterable[Request]:
        """Returns the requests of several steps, after one call of the order for all of them."""
        plan: list[tuple[range, tuple[int, int, int, int, bool, int, int]]] = []  # places, other fields of a request
        share = self.terms.share
        for step in steps:
            epoch, size = self.order.epoch(step), placed.size(step)
            micro = share.deal(size)
            for number, part in enumerate(micro):
                places = part or range(1)  # padding sample: the first of the step
                whose = share.whose(number, len(micro))
                plan.append((places, (step, epoch, len(part), size, number + 1 == len(micro), *whose)))

        ids = iter(self._ids(placed, [places for places, _ in plan], [rest[0] for _, rest in plan]))
        return [Request([*islice(ids, len(places))], *rest) for places, rest in plan]

    def _stepwise(self, placed: SampleBlock, steps: range) -> Iterable[Request]:
        """Yields the requests of several steps, one step at a time; a limit divides the samples by their lengths."""
        share, limit = self.terms.share, self.terms.limit
        for step in steps:
            epoch, size = self.order.epoch(step), placed.size(step)
            ids = np.array(self._ids(placed, [range(size)], [step]))
            parts: list[tuple[Any, int]]
            if limit:
                parts = list(share.divide(ids, limit))
            else:
                parts = [(np.array(part or range(1)), len(part)) for part in share.deal(size)]
            earlier = None if self.order.once else _earlier(ids)
            for number, (places, samples) in enumerate(parts):
                whose, last = share.whose(number, len(parts)), number + 1 == len(parts)
                repeated = () if earlier is None else earlier[places].tolist()
                yield Request(ids[places].tolist(), step, epoch, samples, size, last, *whose, repeated)

    def _ids(self, placed: SampleBlock, places: list[range], steps: list[int]) -> list[int]:
        flat = np.concatenate([np.arange(part.start, part.stop, dtype=np.uint64) for part in places])
        found = placed.ids(np.repeat(np.array(steps, dtype=np.uint64), [len(part) for part in places]), flat)
        if (outside := np.flatnonzero((found < 0) | (found >= self.samples))).size:
            raise PluginError(
                f"the sampler {type(self.order).__name__} returned sample {found[outside[0]]} for step "
                f"{steps[-1]} or earlier, but the data has only {self.samples}",
                hints=["a sampler must return indices of samples, from 0 to the length of the data minus 1"],
            )
        ids: list[int] = found.tolist()
        return ids


def _earlier(ids: NDArray[Any]) -> NDArray[Any] | None:
    """Returns for each sample how often it comes before in `ids`; None if all differ."""
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    first = np.searchsorted(ordered, ordered)  # of each run of equal samples
    if (first == np.arange(len(ids))).all():
        return None
    found = np.empty(len(ids), dtype=np.int64)
    found[order] = np.arange(len(ids)) - first
    return found


class Even(EpochBatchSampler):
    """Order with every sample once, in dataset order, in batches of nearly equal size, at most `global_batch`."""

    # For losses that compare the samples of a batch: batches do not depend on the number of ranks, and none is small.
    once = True

    def __init__(self, data: Any, global_batch: int) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=False)

    @property
    def smallest(self) -> int:
        """Returns the number of samples in the smallest batch."""
        return self.places // self.steps_per_epoch

    def size(self, step: int) -> int:
        """Returns the number of samples in a batch."""
        first, end = (edge * self.places // self.steps_per_epoch for edge in (step, step + 1))
        return end - first

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at the given places within the given batches."""
        found: NDArray[Any] = steps.astype("int64") * self.places // self.steps_per_epoch + places.astype("int64")
        return found

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the places themselves: the order of the dataset."""
        return places
