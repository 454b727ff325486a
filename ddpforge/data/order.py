"""The samples that a rank sees, as arithmetic on the step.

Step `s` of an epoch trains on places `[s·G, (s+1)·G)` of that epoch's order, G being the global batch. The order is
one permutation per epoch, a pure function of (seed, epoch); the number of ranks decides who computes a sample, never
which samples form a step. Nothing is stored for a resume, and nothing is padded, repeated or lost at uneven ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddpforge.data.randomness import mix

__all__ = ["MicroBatch", "Order", "RankShare", "Request", "permute"]

_BLOCK = 1 << 12  # samples whose order is computed in one vectorised go
_ROUNDS = 6


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


@dataclass(frozen=True, kw_only=True)
class Order:
    """The micro-batches of one rank in the order of training (or, without shuffling, of evaluation)."""

    samples: int
    global_batch: int
    share: RankShare
    seed: int
    shuffle: bool
    drop_last: bool

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, the incomplete last one included unless it is dropped."""
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
