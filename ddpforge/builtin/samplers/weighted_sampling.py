"""Samples that come more or less often than once an epoch: classes in balance, and by weight."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.builtin.samplers.columns import column, numbers
from ddpforge.builtin.samplers.permutation import draw, key, permute
from ddpforge.errors import UsageError
from ddpforge.interfaces import EpochBatchSampler, mix

__all__ = ["Balanced", "Weighted"]

_STEPS, _CLASSES, _MEMBERS, _OFFSET = 0x57E9, 0xC1A5, 0x3E3B, 0x0FF5  # keep the random numbers of different uses apart


class Balanced(EpochBatchSampler):
    """All classes equally often: their numbers in a step, and in an epoch, differ by one at most.

    Classes take turns from step to step; within a step their order is random. All samples of a class come before one
    of them comes again, also where an epoch ends in between. With `epoch = "smallest"` each epoch draws anew.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        by: Annotated[
            str, Field(min_length=1, description="The classes: an attribute or method of the dataset, or a file.")
        ] = "labels",
        replacement: Annotated[
            bool, Field(description="Draw again each time; else all samples of a class come before one comes again.")
        ] = False,
        epoch: Annotated[
            Literal["all", "smallest"],
            Field(
                description="As many samples as the data has, or as many of each class as the smallest has; then,"
                " without replacement, no sample comes twice in an epoch."
            ),
        ] = "all",
    ) -> None:
        values = column(data, by)
        if values.dtype.kind == "f" and (bad := np.flatnonzero(np.isnan(values))).size:
            raise UsageError(
                f"by: sample {bad[0]} has no class in `{by}`, but NaN, and so have {bad.size} in all",
                hints=["leave those samples out, or give them a class of their own"],
            )
        names, classes, counts = np.unique(values, return_inverse=True, return_counts=True)
        places = len(classes) if epoch == "all" else int(counts.min()) * len(names)
        super().__init__(places, global_batch=global_batch, drop_last=drop_last)
        self.once = epoch == "smallest" and not replacement
        self._members = np.argsort(classes, kind="stable")
        self._counts = counts.astype(np.uint64)
        self._first = np.cumsum(self._counts) - self._counts
        self._replacement, self._seed = replacement, seed
        self._goes_on = epoch == "all"
        self._used = min(places, self.steps_per_epoch * global_batch)  # of an epoch's places

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """For each place the class, and the member of it."""
        steps, within = np.divmod(places, np.uint64(self.global_batch))
        begins = steps * np.uint64(self.global_batch)
        sizes = np.minimum(np.uint64(self.global_batch), np.uint64(self.places) - begins)
        places = begins + permute(within, key(epochs, steps), sizes, mix(self._seed, _STEPS))
        if self._goes_on:  # one row of places over all epochs
            places, epochs = epochs * np.uint64(self._used) + places, np.zeros_like(epochs)
        turns, within = np.divmod(places, np.uint64(len(self._counts)))
        chosen = permute(within, epochs, len(self._counts), mix(self._seed, _CLASSES))
        counts, seed = self._counts[chosen], mix(self._seed, _MEMBERS)
        if self._replacement:
            member = draw(key(epochs, turns, chosen), counts, seed)
        else:
            rounds, turns = np.divmod(turns, counts)
            member = permute(turns, key(epochs, rounds, chosen), counts, seed)
        found: NDArray[Any] = self._members[self._first[chosen] + member]
        return found


class Weighted(EpochBatchSampler):
    """Samples as often as their weights say: in an epoch of n, n · weight / Σ weights times, rounded up or down.

    Places of equal distance on the line of all weights, shifted at random for each epoch, in random order (systematic
    sampling): what independent draws would give on average, with less left to chance.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        by: Annotated[
            str, Field(min_length=1, description="The weights: an attribute or method of the dataset, or a file.")
        ] = "weights",
        samples: Annotated[
            int | None, Field(ge=1, description="Samples in an epoch; absent: as many as the data has.")
        ] = None,
    ) -> None:
        super().__init__(samples or len(data), global_batch=global_batch, drop_last=drop_last)
        weights = numbers(data, by, least=0)
        if not (total := weights.sum()) > 0 or not np.isfinite(total):
            raise UsageError(f"by: the weights in `{by}` add up to {total:g}; at least one must be more than 0")
        self._edges = np.cumsum(weights / total)
        self._edges /= self._edges[-1]
        self._seed = seed

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """For each place a point on the line, and the sample that it lies in."""
        points = permute(places, epochs, self.places, self._seed).astype(np.float64)
        points += draw(epochs, np.full_like(epochs, 2**32 - 1), mix(self._seed, _OFFSET)) / 2**32
        found: NDArray[Any] = np.searchsorted(self._edges, points / self.places, side="right")
        return found
