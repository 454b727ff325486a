"""Samplers of training data: which samples form a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BatchSampler", "EpochBatchSampler"]


class BatchSampler(ABC):
    """Says which samples of a map-style dataset form each training step: a pure function of the step.

    Nothing of it is saved: a resume asks for the step it begins with. Which rank computes a sample is not its concern:
    ddpforge deals the samples of a step out. Steps may have different sizes, and a sample may come any number of times.

    Where the turns of a task have batches of their own, each batch is a step here.

    A component of this kind is a class, or a function that returns a BatchSampler. It is handed over, where its
    signature names them: `data`, the dataset; `seed`, the recipe's; `global_batch`; and `drop_last`, true where an
    epoch's incomplete last step is not to be trained on.
    """

    steps_per_epoch: int | None = None
    """The length of an epoch; None where epochs have no length, so that the recipe must count in steps."""

    once: bool = False
    """True if no sample comes twice in an epoch. What is drawn for a sample (augmentation) depends on (seed, epoch,
    sample) then, otherwise on (seed, step, sample)."""

    @abstractmethod
    def __call__(self, step: int) -> Sequence[int]:
        """The samples of a step, 0 being the first, over all ranks: at least one; an array will do."""

    def epoch(self, step: int) -> int:
        """The epoch, from 0, that a step belongs to; what `set_epoch` of the dataset is told."""
        return step // self.steps_per_epoch if self.steps_per_epoch else 0


class EpochBatchSampler(BatchSampler):
    """A sampler for which an epoch is a row of places, each step takes the next global batch of them.

    Only `at` is left to say. It works on arrays, and is asked for the places of one rank alone.
    """

    steps_per_epoch: int

    def __init__(self, places: int, *, global_batch: int, drop_last: bool) -> None:
        full, rest = divmod(places, global_batch)
        self.steps_per_epoch = full + (rest > 0 and not drop_last)
        self.places, self.global_batch = places, global_batch

    @abstractmethod
    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The samples at the given places of the given epochs: two arrays of one shape (uint64)."""

    def __call__(self, step: int) -> Sequence[int]:
        """The samples at all places of a step."""
        import numpy as np

        size = self.size(step)
        ids: list[int] = self.ids(np.full(size, step, dtype=np.uint64), np.arange(size, dtype=np.uint64)).tolist()
        return ids

    def size(self, step: int) -> int:
        """The number of samples in a step."""
        return min(self.global_batch, self.places - step % self.steps_per_epoch * self.global_batch)

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The samples at the given places within the given steps."""
        import numpy as np

        epochs, turns = np.divmod(steps, np.uint64(self.steps_per_epoch))
        return self.at(epochs, turns * np.uint64(self.global_batch) + places)
