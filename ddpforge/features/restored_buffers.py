"""Buffers after a gradient that is not finite: restored, so that training can continue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Self

from torch import Tensor, nn
from typing_extensions import override

from ddpforge.data import MicroBatch
from ddpforge.interfaces import Total
from ddpforge.training.buffers import Buffers
from ddpforge.training.features import Assembled, Feature, TakesSteps

__all__ = ["KeepsBuffers", "RestoredBuffers"]


class RestoredBuffers(Feature):
    """Restored buffers, in runs that may skip an update."""

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature if a step with a gradient that is not finite does not end the run."""
        train = run.parts.recipe.train
        return cls() if run.trains and (train.on_nonfinite == "skip" or train.precision == "fp16") else None

    @override
    def start(self, stateful: nn.Module) -> None:
        self._stateful = stateful

    @override
    def around_stepper(self, stepper: TakesSteps) -> TakesSteps:
        return KeepsBuffers(stepper, self._stateful)


class KeepsBuffers:
    """Stepper that restores the buffers if a gradient is not finite, so that training can continue."""

    def __init__(self, stepper: TakesSteps, stateful: nn.Module) -> None:
        self._stepper, self._stateful = stepper, stateful

    def train_step(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int = 0
    ) -> tuple[dict[str, Total], Tensor]:
        """Takes a step, and restores the buffers if the norm is not finite."""
        before = Buffers(self._stateful)
        totals, norm = self._stepper.train_step(step, first, micro_batches, measure=measure, update=update)
        before.restore_unless_finite(norm)
        return totals, norm
