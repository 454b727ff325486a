"""Updates of a task: a task for each of them, their metrics by name, and their order in a step."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ddpforge.errors import PluginError
from ddpforge.interfaces import Metric, Task
from ddpforge.recipe.schema import UpdateComponent

if TYPE_CHECKING:
    from torch import Tensor, nn


__all__ = [
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
