"""Order that repeats steps, as PPO's epochs do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from ddpforge.interfaces import BatchSampler, Shuffled

__all__ = ["Repeated"]

_MOST = 64  # steps whose samples are cached


class Repeated(BatchSampler):
    """BatchSampler that repeats each group of `steps` steps of another sampler `times` times, as PPO's epochs do.

    With `steps = 2` and `times = 3`: steps 0 1 0 1 0 1, then 2 3 2 3 2 3. Random numbers (augmentation) differ in each
    repetition.
    """

    def __init__(
        self,
        data: Any,
        seed: int,
        global_batch: int,
        drop_last: bool,
        *,
        times: Annotated[int, Field(ge=1, le=10**6, description="Number of times that each step comes.")],
        steps: Annotated[int, Field(ge=1, le=10**6, description="Number of steps that are repeated as a group.")] = 1,
        sampler: Annotated[
            BatchSampler | None, Field(description="Sampler that provides the steps to repeat; absent: `shuffled`.")
        ] = None,
    ) -> None:
        self._order = sampler or Shuffled(data, seed, global_batch, drop_last)
        self._samples = lru_cache(maxsize=min(steps, _MOST))(self._order)
        self._times, self._steps = times, steps
        if (inner := self._order.steps_per_epoch) is not None and inner % steps == 0:
            self.steps_per_epoch = inner * times

    def __call__(self, step: int) -> Sequence[int]:
        """Returns the samples of the repeated step."""
        return self._samples(self._inner(step))

    def epoch(self, step: int) -> int:
        """Returns the epoch of the repeated step."""
        return self._order.epoch(self._inner(step))

    def _inner(self, step: int) -> int:
        cycle, within = divmod(step, self._steps * self._times)
        return cycle * self._steps + within % self._steps
