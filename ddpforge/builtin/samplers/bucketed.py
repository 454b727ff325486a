"""Batches of samples of like length, so that little is padded."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.builtin.samplers.columns import numbers
from ddpforge.builtin.samplers.permutation import key, permute
from ddpforge.interfaces import EpochBatchSampler, mix

__all__ = ["Bucketed"]

_STEPS = 0x57E9  # keeps the order of steps apart from that of samples


class Bucketed(EpochBatchSampler):
    """Every sample once an epoch, and samples of like length in one step.

    A random part of the epoch, `window` steps long, is sorted by length and cut into steps, which come in random order;
    then the next part. The incomplete last step of an epoch is a random choice of its own. Within a step samples are
    sorted, so that those of a micro-batch are even more alike.
    """

    once = True

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        by: Annotated[
            str, Field(min_length=1, description="The lengths: an attribute or method of the dataset, or a file.")
        ] = "lengths",
        window: Annotated[
            int,
            Field(ge=1, le=2**20, description="Steps that are sorted together: the more, the less is padded."),
        ] = 50,
    ) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)
        self._lengths = numbers(data, by)
        self._full = self.places - self.places % global_batch  # where the incomplete last step begins
        self._each = window * global_batch
        self._seed = seed
        self._window = lru_cache(maxsize=2)(self._sorted)

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Whole windows, of which those that were asked for last are kept."""
        windows = np.uint64(-(-self._full // self._each) + 1)  # of an epoch; the last is its incomplete step
        number = epochs * windows + np.where(places < self._full, places // self._each, windows - 1)
        ids = np.empty_like(places)
        for one in np.unique(number).tolist():
            epoch, window = divmod(one, int(windows))
            start = min(window * self._each, self._full)
            asked = np.flatnonzero(number == one)
            ids[asked] = self._window(epoch, start)[places[asked] - np.uint64(start)]
        return ids

    def _sorted(self, epoch: int, start: int) -> NDArray[np.uint64]:
        """The samples of the window of an epoch that begins at `start`."""
        stop = min(start + self._each, self._full) if start < self._full else self.places
        places = np.arange(start, stop, dtype=np.uint64)
        ids = permute(places, np.full_like(places, epoch), self.places, self._seed)
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        if start == self._full:
            return ids
        steps = np.arange(len(ids) // self.global_batch, dtype=np.uint64)
        turns = permute(
            steps,
            key(np.full_like(steps, epoch), np.full_like(steps, start)),
            len(steps),
            mix(self._seed, _STEPS),
        )
        return ids.reshape(len(steps), self.global_batch)[turns].ravel()
