"""Curricula: training starts with the easiest samples, or with small steps."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import count
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import BatchSampler, Duration, Horizon, Shuffled, mix
from ddpforge.interfaces.columns import numbers
from ddpforge.interfaces.permutation import permute

__all__ = ["Curriculum", "Growing"]

_EASY = 0xEA57  # separates the random numbers of the curriculum from those of the epochs
_LONGEST = 10**6  # steps
_PART = 1 << 12  # samples whose order is computed together


class Curriculum(Shuffled):
    """Curriculum: each step samples from the easiest part of the data, which grows linearly to the whole dataset.

    During this time no sample comes twice in a step, but a sample may come twice in an epoch. Afterwards every sample
    comes once per epoch, in random order. `by = "lengths"` gives a sequence-length curriculum.
    """

    once = False

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        by: Annotated[
            str,
            Field(
                min_length=1,
                description="Difficulty (lower is easier): an attribute or method of the dataset, or a file.",
            ),
        ] = "difficulty",
        until: Annotated[Duration, Field(description="Duration until all data is in use, in epochs or steps.")],
        start: Annotated[float, Field(gt=0, le=1, description="Fraction of the data at the first step.")] = 0.1,
    ) -> None:
        super().__init__(data, seed, global_batch, drop_last)
        self._easiest = np.argsort(numbers(data, by), kind="stable").astype(np.uint64)
        if until.unit not in ("ep", "st"):
            raise UsageError(f"until: {until} must be in epochs or steps", hints=['for example "2ep" or "1000st"'])
        self._until = Horizon(None, self.steps_per_epoch).steps(until)
        self._start = start

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """Returns the samples at these positions: of the epoch's permutation, or of the easiest part while it grows."""
        turns, within = np.divmod(places, np.uint64(self.global_batch))
        steps = epochs * np.uint64(self.steps_per_epoch) + turns
        ids = super().at(epochs, places)
        grows = np.flatnonzero(steps < self._until)
        if grows.size:
            steps = steps[grows]
            pool = self._pool(steps)
            ids[grows] = self._easiest[permute(within[grows], steps, pool, mix(self.seed, _EASY))]
        return ids

    def _pool(self, steps: NDArray[Any]) -> NDArray[np.uint64]:
        """Returns the number of easiest samples that each step samples from."""
        share = self._start + (1 - self._start) * steps / self._until
        return np.clip(np.ceil(share * self.places), min(self.global_batch, self.places), self.places).astype(np.uint64)


class Growing(BatchSampler):
    """Batch-size warmup: step sizes grow linearly from `start` to the global batch; every sample once per epoch.

    A step never extends beyond the end of its epoch. Epochs have different numbers of steps, so intervals such as
    `checkpoint.every` and `train.eval_every` must be in steps; `train.length` may be in whole epochs.
    """

    once = True

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        start: Annotated[int, Field(ge=1, description="Number of samples in the first step, over all ranks.")],
        until: Annotated[Duration, Field(description="First step with the full global batch, in steps.")],
    ) -> None:
        if until.unit != "st" or until.value > _LONGEST:
            raise UsageError(f"until: {until} must be in steps, {_LONGEST} at most", hints=['for example "1000st"'])
        if start > global_batch:
            raise UsageError(f"start: {start} is more than train.global_batch, {global_batch}")
        if drop_last and len(data) < global_batch:
            raise UsageError(f"{type(data).__name__} has {len(data)} samples, less than one global batch")
        self._samples, self._batch, self._seed, self._drops = len(data), global_batch, seed, drop_last
        self._part = lru_cache(maxsize=2)(self._permuted)  # small steps share one
        self._grown = int(until.value)
        sizes = [start + (global_batch - start) * step // self._grown for step in range(self._grown)]
        self._table = self._positions([*sizes, global_batch])

    def __call__(self, step: int) -> Sequence[int]:
        """Returns the samples of a step: a slice of the epoch's permutation."""
        epoch, begin, size = self._position(step)
        first, last = begin // _PART, (begin + size - 1) // _PART
        parts = np.concatenate([self._part(epoch, number) for number in range(first, last + 1)])
        ids: list[int] = parts[begin - first * _PART :][:size].tolist()
        return ids

    def _permuted(self, epoch: int, number: int) -> NDArray[np.uint64]:
        """Returns part `number` of an epoch's permutation."""
        places = np.arange(number * _PART, min(number * _PART + _PART, self._samples), dtype=np.uint64)
        return permute(places, np.full_like(places, epoch), self._samples, self._seed)

    def epoch(self, step: int) -> int:
        """Returns the epoch of a step; an epoch ends when every sample was used."""
        return self._position(step)[0]

    def _position(self, step: int) -> tuple[int, int, int]:
        """Returns the epoch of a step, its first position in the epoch, and its size."""
        epoch, begin, size = (int(part) for part in self._table[min(step, self._grown)])
        later = step - self._grown
        if later <= 0:
            return epoch, begin, size
        here = self._steps(
            self._samples - begin
        )  # full-size steps from the last one in the table to the end of its epoch
        if later >= here:
            full, later = divmod(later - here, self._steps(self._samples))
            epoch, begin = epoch + 1 + full, 0
        begin += later * self._batch
        return epoch, begin, min(self._batch, self._samples - begin)

    def _steps(self, samples: int) -> int:
        full, rest = divmod(samples, self._batch)
        return full + (rest > 0 and not self._drops)

    def _positions(self, sizes: list[int]) -> NDArray[np.int64]:
        """Returns (epoch, begin, size) of each step, for these wanted sizes."""
        found = np.empty((len(sizes), 3), dtype=np.int64)
        epoch = begin = 0
        for step, size in zip(count(), sizes, strict=False):
            left = self._samples - begin
            if left == 0 or (self._drops and left < size):
                epoch, begin, left = epoch + 1, 0, self._samples
            found[step] = epoch, begin, min(size, left)
            begin += min(size, left)
        return found
