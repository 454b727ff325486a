"""Alternating updates: several updates in a step, each of its own parameters, as for a GAN."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Self, cast

import torch
from torch import Tensor
from typing_extensions import override

from ddpforge.data import MicroBatch
from ddpforge.errors import StrategyError
from ddpforge.interfaces import AlternatesUpdates, Replica, Total, device_kind
from ddpforge.recipe.schema import UpdateComponent
from ddpforge.training.features import Assembled, Feature, GlobalBatch, TakesSteps
from ddpforge.training.totals import add
from ddpforge.training.updates import metric_name, update_schedule

__all__ = ["AlternatingUpdates", "SeveralUpdates"]


class SeveralUpdates(Feature):
    """Steps of the updates that a task declares, see `Task.updates`."""

    def __init__(self, replica: Replica, updates: Mapping[str, UpdateComponent]) -> None:
        self._replica, self._updates = replica, updates

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature if the task declares updates."""
        return cls(run.replica, run.parts.updates) if run.trains and run.parts.updates else None

    @override
    def combine(self, steppers: Mapping[str, TakesSteps], draw: Callable[[], GlobalBatch]) -> TakesSteps:
        return AlternatingUpdates(self._replica, steppers, self._updates, draw)


class AlternatingUpdates:
    """Takes steps of several updates: the recipe's `updates`, in the order of the task, each by its stepper.

    Updates are independent: if the gradient of an update is not finite, only this update is skipped.
    """

    def __init__(
        self,
        replica: Replica,
        steppers: Mapping[str, TakesSteps],
        updates: Mapping[str, UpdateComponent],
        draw: Callable[[], GlobalBatch],
    ) -> None:
        """Prepares the updates; `draw` returns the next global batch, after the first one of a step."""
        self._steppers, self.updates, self._draw = steppers, update_schedule(updates), draw
        self._replica = cast(AlternatesUpdates, replica)
        if not isinstance(replica, AlternatesUpdates):
            raise StrategyError(
                f"the task makes the updates of {' and '.join(updates)} in each step, but the strategy makes one",
                hints=['set strategy.use = "ddp" or "fsdp"'],
            )

    def train_step(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int = 0
    ) -> tuple[dict[str, Total], Tensor]:
        """Takes one step, whose first global batch is given; the norm (0-d) is over all parameters."""
        found: dict[str, Total] = {}
        norms: dict[str, list[Tensor]] = {}
        for number, one in enumerate(self.updates):
            if number and one.new_batch:
                first, micro_batches = self._draw()
            if one.shared:
                micro_batches = list(micro_batches)
            stepper = self._steppers[one.name]
            with self._replica.select_update(one.name):
                totals, norm = stepper.train_step(step, first, micro_batches, measure=measure, update=update + number)
            add(found, {metric_name(name, one.name): total for name, total in totals.items()})
            norms.setdefault(one.name, []).append(norm)
        means = {update: _root_mean_square(each) for update, each in norms.items()}
        found |= {metric_name("grad_norm", update): Total(norm, 1) for update, norm in means.items()}
        return found, torch.linalg.vector_norm(torch.stack(list(means.values())))


def _root_mean_square(norms: Sequence[Tensor]) -> Tensor:
    """Returns the root mean square of the norms of an update's updates in one step."""
    found = torch.stack(list(norms)) if len(norms) > 1 else norms[0]
    found = found.to(device_kind(found.device).widest_float)
    return found if len(norms) == 1 else found.square().mean().sqrt()
