"""Orders with every sample once per epoch: shuffled, or in the order of the data."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ddpforge.interfaces import EpochBatchSampler
from ddpforge.interfaces.permutation import permute

__all__ = ["Sequential", "Shuffled"]


class Shuffled(EpochBatchSampler):
    """Every sample once per epoch, in a different random order in each epoch; the default."""

    once = True

    def __init__(self, data: Any, seed: int, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)
        self._seed = seed

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at these positions of each epoch's permutation."""
        return permute(places, epochs, self.places, self._seed)


class Sequential(EpochBatchSampler):
    """Every sample once per epoch, in the order of the data."""

    once = True

    def __init__(self, data: Any, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the positions unchanged."""
        return places
