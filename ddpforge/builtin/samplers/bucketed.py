"""Bucketed batches: samples of similar length in one step, to reduce padding."""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.interfaces import Shuffled, mix
from ddpforge.interfaces.columns import numbers
from ddpforge.interfaces.permutation import key, permute

__all__ = ["Bucketed"]

_STEPS = 0x57E9  # separates the random order of steps from that of samples


class Bucketed(Shuffled):
    """Every sample once per epoch, with samples of similar length in one step.

    The shuffled epoch is cut into windows of `window` steps. Each window is sorted by length and cut into steps, which
    come in random order. The incomplete last step of an epoch is a random choice of samples. Samples are sorted within
    a step, so that those of a micro-batch have even more similar lengths.
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
            Field(min_length=1, description="Lengths of samples: an attribute or method of the dataset, or a file."),
        ] = "lengths",
        window: Annotated[
            int,
            Field(
                ge=1, le=2**20, description="Number of steps that are sorted together; more steps need less padding."
            ),
        ] = 50,
    ) -> None:
        super().__init__(data, seed, global_batch, drop_last)
        self._lengths = numbers(data, by)
        self._full = self.places - self.places % global_batch  # start of the incomplete last step
        self._each = window * global_batch
        self._window = lru_cache(maxsize=2)(self._sorted)

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at these positions; computes whole windows and caches the last two."""
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
        """Returns the samples of the window that begins at `start`."""
        stop = min(start + self._each, self._full) if start < self._full else self.places
        places = np.arange(start, stop, dtype=np.uint64)
        ids = super().at(np.full_like(places, epoch), places)
        ids = ids[np.argsort(self._lengths[ids], kind="stable")]
        if start == self._full:
            return ids
        steps = np.arange(len(ids) // self.global_batch, dtype=np.uint64)
        turns = permute(
            steps,
            key(np.full_like(steps, epoch), np.full_like(steps, start)),
            len(steps),
            mix(self.seed, _STEPS),
        )
        return ids.reshape(len(steps), self.global_batch)[turns].ravel()
