"""Samplers of training data: which samples form a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BatchSampler", "EpochBatchSampler", "Sequential", "Shuffled", "SourceSampler"]


class BatchSampler(ABC):
    """Sampler: determines which samples of a map-style dataset form each training step, as a pure function of the step.

    Checkpoints contain nothing of it; a resume calls it with the first step to train. ddpforge distributes the samples
    of a step over the ranks. Steps may have different sizes, and a sample may come any number of times.

    If the alternating updates of a task use batches of their own, each batch is a step here.

    A component of this kind is a class, or a function that returns a BatchSampler. It receives the following arguments
    if its signature names them:

    - `data`: the dataset;
    - `seed`: the recipe's seed;
    - `global_batch`: the recipe's global batch size;
    - `drop_last`: True if the incomplete last step of an epoch is skipped.
    """

    steps_per_epoch: int | None = None
    """Length of an epoch; None if epochs have no fixed length: the recipe must then give durations in steps."""

    once: bool = False
    """True if no sample comes twice in an epoch. The RNG of a sample (augmentation) is then seeded from (seed, epoch,
    sample), otherwise from (seed, step, sample)."""

    @abstractmethod
    def __call__(self, step: int) -> Sequence[int]:
        """Returns the indices of the samples of a step over all ranks, at least one, as a sequence or an array.

        The first step is 0.
        """

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step, from 0; it is passed to `set_epoch` of the dataset."""
        return step // self.steps_per_epoch if self.steps_per_epoch else 0


class EpochBatchSampler(BatchSampler):
    """Sampler with epochs of `places` positions in a row; each step takes the next `global_batch` positions.

    Subclasses implement only `at`. It works on arrays, and receives only the positions of one rank.
    """

    steps_per_epoch: int

    def __init__(self, places: int, *, global_batch: int, drop_last: bool) -> None:
        full, rest = divmod(places, global_batch)
        self.steps_per_epoch = full + (rest > 0 and not drop_last)
        self.places, self.global_batch = places, global_batch

    @abstractmethod
    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at the given positions of the given epochs; both arrays have one shape, uint64."""

    def __call__(self, step: int) -> Sequence[int]:
        """Returns the samples at all positions of a step."""
        import numpy as np

        size = self.size(step)
        ids: list[int] = self.ids(np.full(size, step, dtype=np.uint64), np.arange(size, dtype=np.uint64)).tolist()
        return ids

    def size(self, step: int) -> int:
        """Returns the number of samples in a step."""
        return min(self.global_batch, self.places - step % self.steps_per_epoch * self.global_batch)

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at the given positions within the given steps."""
        import numpy as np

        epochs, turns = np.divmod(steps, np.uint64(self.steps_per_epoch))
        return self.at(epochs, turns * np.uint64(self.global_batch) + places)


class Sequential(EpochBatchSampler):
    """Every sample once per epoch, in the order of the data."""

    once = True

    def __init__(self, data: Any, global_batch: int, drop_last: bool) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=drop_last)

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the positions unchanged."""
        return places


class Shuffled(Sequential):
    """Every sample once per epoch, in a different random order in each epoch; the default."""

    def __init__(self, data: Any, seed: int, global_batch: int, drop_last: bool) -> None:
        super().__init__(data, global_batch, drop_last)
        self.seed = seed

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at these positions of each epoch's permutation."""
        from ddpforge.interfaces.permutation import permute

        return permute(places, epochs, self.places, self.seed)


class SourceSampler(EpochBatchSampler):
    """Sampler of several sources that are one dataset, one source after the other."""

    names: Sequence[str] = ()
    """Names of the sources."""

    last_change: int = 0
    """The last step at which the shares of the sources change; 0 if they never do."""

    @abstractmethod
    def shares(self) -> Sequence[float]:
        """Returns the share of each source in the first steps."""

    @abstractmethod
    def epochs_of_sources(self, steps: int) -> Sequence[float]:
        """Returns how often the first `steps` steps go through each source: 1.5 is one and a half epochs."""
