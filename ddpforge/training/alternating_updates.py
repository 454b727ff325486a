"""Alternating updates: a task for each of its updates, and the order of the updates in a step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import AlternatesUpdates, Metric, Replica, Task, Total, device_kind
from ddpforge.recipe.schema import UpdateComponent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ddpforge.data import MicroBatch

__all__ = [
    "AlternatingUpdates",
    "TakesSteps",
    "UpdateTask",
    "accepts_update",
    "batches_per_step",
    "finish_metrics",
    "metric_name",
    "reported_metrics",
    "tasks_by_update",
    "update_names",
    "update_schedule",
    "with_summed_loss",
]


# ---------------------------------------------------------------------------------------------- the task
def update_names(task: Task) -> tuple[str, ...]:
    """Returns the updates that a task declares; raises PluginError for invalid names."""
    updates: Any = task.updates
    if isinstance(updates, str) or not all(
        isinstance(update, str) and re.fullmatch(r"[\w-]+", update) for update in updates
    ):
        raise PluginError(
            f"{type(task).__name__}.updates is {updates!r}, but must be names of letters, digits, `_` and `-`",
            hints=['e.g. updates = ("discriminator", "generator")'],
        )
    return tuple(updates)


def accepts_update(task: Task) -> bool:
    """True if the loss of a task takes the update as its third argument."""
    try:
        inspect.signature(task.loss).bind(None, None, "")
    except TypeError:
        return False
    return True


def tasks_by_update(task: Task) -> dict[str, Task]:
    """Returns the task for each of its updates, by update; without updates, the task itself as ""."""
    return {update: cast(Task, UpdateTask(task, update)) for update in update_names(task)} or {"": task}


class UpdateTask:
    """Task with the loss of one update; everything else is from `task`."""

    def __init__(self, task: Task, update: str) -> None:
        self.task, self.update = task, update
        self.named_as = task  # see `component_name`

    def __getattr__(self, name: str) -> Any:
        if name in ("task", "update"):  # a copy that is not complete yet
            raise AttributeError(name)
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the loss of the update, and its outputs."""
        loss: Any = self.task.loss
        pair: tuple[Tensor, Any] = loss(model, batch, self.update)
        return pair

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Calls the task's `finish` with the update's metrics, which have the update appended to their names."""
        return self.task.finish({metric_name(name, self.update): value for name, value in metrics.items()})


def reported_metrics(task: Task) -> Mapping[str, Metric]:
    """Returns a task's metrics by the names that all of its updates report."""
    updates = update_names(task)
    return {
        metric_name(name, update): metric for update in updates for name, metric in task.reports.items()
    } or task.reports


def finish_metrics(task: Task, means: Mapping[str, float]) -> dict[str, float]:
    """Returns the values to report for averaged metrics: adds the sum of losses, and calls the task's `finish`."""
    return task.finish(with_summed_loss(task, means))


def with_summed_loss(task: Task, means: Mapping[str, float]) -> dict[str, float]:
    """Returns the means with `loss`, the sum of the losses of all updates, if there are updates."""
    losses = [means[name] for update in task.updates if (name := metric_name("loss", update)) in means]
    return {"loss": sum(losses), **means} if losses else dict(means)


def metric_name(name: str, update: str) -> str:
    """Returns the name under which an update reports a metric."""
    return f"{name}/{update}" if update else name


# ---------------------------------------------------------------------------------------------- the updates
GlobalBatch: TypeAlias = "tuple[MicroBatch, Iterable[MicroBatch]]"
"""This rank's first micro-batch of a global batch, and all its micro-batches."""


class TakesSteps(Protocol):
    """Takes steps of the weights: a stepper, several of them in turn, or one that restores buffers after bad steps."""

    def train_step(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int = 0
    ) -> tuple[dict[str, Total], Tensor]:
        """Takes a step on a global batch; returns the totals of the metrics, and the norm of the gradient (0-d)."""


@dataclass(frozen=True)
class Update:
    """Update of a step."""

    name: str
    new_batch: bool  # whether it takes a global batch; otherwise it uses the batch of the update before
    shared: bool  # whether the next update uses the same batch


def update_schedule(updates: Mapping[str, UpdateComponent]) -> list[Update]:
    """Returns the updates of a step, in their order; without updates there is one."""
    fresh = [(name, update.new_batch) for name, update in updates.items() for _ in range(update.n_updates)] or [
        ("", True)
    ]
    draws = [True, *(own for _, own in fresh[1:]), True]
    return [Update(name, draws[n], shared=not draws[n + 1]) for n, (name, _) in enumerate(fresh)]


def batches_per_step(updates: Mapping[str, UpdateComponent]) -> int:
    """Returns the number of global batches that a step takes."""
    return sum(update.new_batch for update in update_schedule(updates))


class AlternatingUpdates:
    """Takes steps of several updates: the recipe's `updates`, in the order of the task, each by its function.

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
        import torch

        from ddpforge.training.totals import add

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
    import torch

    found = torch.stack(list(norms)) if len(norms) > 1 else norms[0]
    found = found.to(device_kind(found.device).widest_float)
    return found if len(norms) == 1 else found.square().mean().sqrt()
