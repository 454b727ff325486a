"""Order of a mixture: samples of several sources in fixed shares, each source shuffled in epochs of its own."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpforge.interfaces import SourceSampler, mix
from ddpforge.interfaces.permutation import key, permute

__all__ = ["LONGEST_CYCLE", "MixtureSampler", "Shares", "cycle_of", "spread", "tempered"]

LONGEST_CYCLE = 10_000
"""Maximum number of samples in a cycle: shares are exact to half of 1/10,000 if no shorter cycle has them exactly."""

_SOURCE = 0x50CE  # separates the order of samples within a source from other random numbers

Places = NDArray[np.uint64]


@dataclass(frozen=True)
class Shares:
    """Steps with constant shares: from step `start` on, each cycle has `cycle[i]` samples of source i."""

    start: int
    cycle: tuple[int, ...]

    @cached_property
    def sources(self) -> NDArray[np.int64]:
        """Returns the source of each place in a cycle."""
        return spread(self.cycle)

    @cached_property
    def earlier(self) -> NDArray[np.int64]:
        """Returns for each place in a cycle the number of earlier places with the same source."""
        found = np.empty(len(self.sources), dtype=np.int64)
        for source, count in enumerate(self.cycle):
            found[self.sources == source] = np.arange(count)
        return found

    def counts(self, samples: int) -> NDArray[np.int64]:
        """Returns how many of the first `samples` samples of the stage come from each source."""
        cycles, rest = divmod(samples, len(self.sources))
        return cycles * np.array(self.cycle) + np.bincount(self.sources[:rest], minlength=len(self.cycle))


class MixtureSampler(SourceSampler):
    """Order of several sources that are one dataset, one source after the other, with shares that depend on the step.

    The sources of successive samples repeat in a cycle, so that at every place the number of samples from a source
    differs from its share by less than one. A source is shuffled in epochs of its own: all its samples come before one
    of them comes again. An epoch of the mixture has as many samples as all sources together, rounded up to whole steps;
    every step has `global_batch` samples.
    """

    def __init__(self, sizes: Sequence[int], stages: Sequence[Shares], *, seed: int, global_batch: int) -> None:
        """Prepares the order.

        Args:
            sizes: number of samples of each source.
            stages: shares over time; the first stage starts at step 0, and each later one at a later step.
            seed: the recipe's seed.
            global_batch: number of samples of a step.
        """
        places = math.ceil(sum(sizes) / global_batch) * global_batch
        super().__init__(places, global_batch=global_batch, drop_last=False)
        self.sizes, self.stages, self._seed = sizes, stages, seed
        self._lengths = np.array(sizes, dtype=np.uint64)
        self._offsets = np.cumsum(self._lengths) - self._lengths
        self._starts = np.array([stage.start for stage in stages])
        self.last_change = stages[-1].start if stages else 0

    @cached_property
    def _before(self) -> NDArray[np.int64]:
        """Returns how many samples of each source come before each stage, [stages, sources]."""
        found = [np.zeros(len(self.sizes), dtype=np.int64)]
        for stage, following in zip(self.stages, self.stages[1:], strict=False):
            found.append(found[-1] + stage.counts((following.start - stage.start) * self.global_batch))
        return np.array(found)

    def at(self, epochs: Places, places: Places) -> NDArray[Any]:
        """Returns the samples at these positions: places in the sources, one after the other."""
        sources, turns = self.turns(epochs * np.uint64(self.places) + places)
        lengths = self._lengths[sources]
        rounds, turns_of_round = np.divmod(turns.astype(np.uint64), lengths)
        members = permute(turns_of_round, key(rounds, sources.astype(np.uint64)), lengths, mix(self._seed, _SOURCE))
        return self._offsets[sources] + members

    def turns(self, positions: Places) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the source of each position of the run, and the number of earlier positions with this source."""
        numbers = positions.astype(np.int64)
        sources, turns = np.empty_like(numbers), np.empty_like(numbers)
        stages = np.searchsorted(self._starts, numbers // self.global_batch, side="right") - 1
        for number in np.unique(stages):
            stage, here = self.stages[number], np.flatnonzero(stages == number)
            cycles, within = np.divmod(numbers[here] - stage.start * self.global_batch, len(stage.sources))
            sources[here] = source = stage.sources[within]
            turns[here] = self._before[number][source] + cycles * np.array(stage.cycle)[source] + stage.earlier[within]
        return sources, turns

    def samples(self, steps: int) -> NDArray[np.int64]:
        """Returns how many samples of each source the first `steps` steps have."""
        number = int(np.searchsorted(self._starts, steps, side="right")) - 1
        since = (steps - self.stages[number].start) * self.global_batch
        found: NDArray[np.int64] = self._before[number] + self.stages[number].counts(since)
        return found

    def shares(self) -> list[float]:
        """Returns the share of each source in the first steps."""
        cycle = self.stages[0].cycle
        return [count / sum(cycle) for count in cycle]

    def epochs_of_sources(self, steps: int) -> list[float]:
        """Returns how often the first `steps` steps go through each source: 1.5 is one and a half epochs."""
        found: list[float] = (self.samples(steps) / self._lengths).tolist()
        return found


# ---------------------------------------------------------------------------------------------- shares
def tempered(sizes: Sequence[int], temperature: float) -> list[float]:
    """Returns the weights nᵢ^(1/T) of sources with n samples: T = 1 is by size, and a large T gives equal weights."""
    largest = max(sizes)
    return [size if temperature == 1 else (size / largest) ** (1 / temperature) for size in sizes]


def cycle_of(weights: Sequence[float]) -> tuple[int, ...]:
    """Returns how many samples of each source the shortest cycle has in which the shares of the weights are exact.

    If it had more than `LONGEST_CYCLE` samples, it has that number, rounded by the largest remainders; every source
    with a weight then has one sample or more.
    """
    exact = [Fraction(repr(weight)) for weight in weights]  # decimal, as the recipe has them: 0.7 is 7/10
    shares = [weight / sum(exact) for weight in exact]
    length = math.lcm(*(share.denominator for share in shares))
    if length <= LONGEST_CYCLE:
        return tuple(int(share * length) for share in shares)
    counts = [max(math.floor(share * LONGEST_CYCLE), int(share > 0)) for share in shares]
    while (missing := LONGEST_CYCLE - sum(counts)) != 0:
        step = 1 if missing > 0 else -1
        lacks = [(share * LONGEST_CYCLE - count) * step for share, count in zip(shares, counts, strict=True)]
        free = [place for place, share in enumerate(shares) if share and (step > 0 or counts[place] > 1)]
        for place in sorted(free, key=lambda one: -lacks[one])[: abs(missing)]:
            counts[place] += step
    return tuple(counts)


def spread(counts: Sequence[int]) -> NDArray[np.int64]:
    """Returns the source of each place in a cycle with `counts[i]` places of source i, as evenly as possible.

    After n places, a source has its share n · counts[i] / Σ counts to less than one place: Tijdeman, "The chairman
    assignment problem" (1980).
    """
    # In whole numbers, so that every machine has the same order. A source may come when it has fallen behind its share
    # by 1 / (2S - 2) of a place, for S sources; of these, the one comes that would be a whole place behind first.
    each = np.array(counts, dtype=np.int64)
    total, places = int(each.sum()), np.empty(int(each.sum()), dtype=np.int64)
    active = np.flatnonzero(each)
    if len(active) == 1:
        places[:] = active[0]
        return places
    rates, scale = each[active], 2 * len(active) - 2
    lag = np.zeros(len(active), dtype=np.int64)  # in 1 / total of a place
    for place in range(total):
        lag += rates
        wait = np.where(lag * scale >= total, (total * (scale - 1) - lag * scale) / rates, np.inf)
        chosen = int(np.argmin(wait))
        places[place] = active[chosen]
        lag[chosen] -= total
    return places


def weights_over_steps(
    weights: Mapping[str, Mapping[int, float]],
) -> list[tuple[int, list[float]]]:
    """Returns the weights of all sources from each step on at which one of them changes.

    `weights` has for each source the weight from each of its steps on; every source has one at step 0.
    """
    starts = sorted({start for of_source in weights.values() for start in of_source})
    return [
        (start, [of_source[max(one for one in of_source if one <= start)] for of_source in weights.values()])
        for start in starts
    ]
