"""Every sample once an epoch: in another order each time, or in the data's own."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ddpforge.builtin.samplers.permutation import permute
from ddpforge.interfaces import EpochBatchSampler

__all__ = ["Sequential", "Shuffled"]


class Shuffled(EpochBatchSampler):
    """Every sample once an epoch, in a random order of the epoch's own; the default."""

    once = True

    def __init__(self, data: Any, seed: int, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)
        self._seed = seed

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """A permutation for each epoch."""
        return permute(places, epochs, self.places, self._seed)


class Sequential(EpochBatchSampler):
    """Every sample once an epoch, in the order of the data."""

    once = True

    def __init__(self, data: Any, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The places themselves."""
        return places
