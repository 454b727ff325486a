"""Orders in which samples come more or less often than once per epoch: balanced classes, and weighted sampling."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import EpochBatchSampler, mix
from ddpforge.interfaces.columns import column, numbers
from ddpforge.interfaces.permutation import draw, key, permute

__all__ = ["Balanced", "Weighted"]

_STEPS, _CLASSES, _MEMBERS, _OFFSET = 0x57E9, 0xC1A5, 0x3E3B, 0x0FF5  # separate the random numbers of different uses


class Balanced(EpochBatchSampler):
    """Balanced classes: the sample counts of classes differ by at most one in each step and in each epoch.

    Within a step the order is random. Without `replacement`, all samples of a class come before one of them comes
    again, also across epochs. With `epoch = "smallest"` each epoch samples independently of the others.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        by: Annotated[
            str,
            Field(min_length=1, description="Classes of samples: an attribute or method of the dataset, or a file."),
        ] = "labels",
        replacement: Annotated[
            bool, Field(description="Sample with replacement; else all samples of a class come before one comes again.")
        ] = False,
        epoch: Annotated[
            Literal["all", "smallest"],
            Field(
                description='Length of an epoch: "all" is the number of samples in the data; "smallest" uses the size'
                " of the smallest class for each class, and without replacement no sample comes twice in an epoch."
            ),
        ] = "all",
    ) -> None:
        values = column(data, by)
        if values.dtype.kind == "f" and (bad := np.flatnonzero(np.isnan(values))).size:
            raise UsageError(
                f"by: in `{by}` the class of sample {bad[0]} is NaN; {bad.size} samples have no class",
                hints=["remove these samples, or give them a class of their own"],
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
        """Returns the samples at these positions: chooses a class, then one of its samples."""
        steps, within = np.divmod(places, np.uint64(self.global_batch))
        begins = steps * np.uint64(self.global_batch)
        sizes = np.minimum(np.uint64(self.global_batch), np.uint64(self.places) - begins)
        places = begins + permute(within, key(epochs, steps), sizes, mix(self._seed, _STEPS))
        if self._goes_on:  # count positions over all epochs
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
    """Weighted sampling: in an epoch of n samples, a sample comes n · weight / Σ weights times, rounded up or down.

    Systematic sampling, in random order: equidistant points on the cumulative weights, with a random offset for each
    epoch. Counts have the same mean as for independent sampling, and less variance.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        by: Annotated[
            str,
            Field(min_length=1, description="Weights of samples: an attribute or method of the dataset, or a file."),
        ] = "weights",
        samples: Annotated[
            int | None,
            Field(ge=1, description="Number of samples in an epoch; absent: the number of samples in the data."),
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
        """Returns the samples at these positions, by searching points in the cumulative weights."""
        points = permute(places, epochs, self.places, self._seed).astype(np.float64)
        points += draw(epochs, np.full_like(epochs, 2**32 - 1), mix(self._seed, _OFFSET)) / 2**32
        found: NDArray[Any] = np.searchsorted(self._edges, points / self.places, side="right")
        return found
