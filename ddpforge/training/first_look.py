"""Looks closely at a task's first batch, loss and totals, so that what has the wrong form is told in words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import getsourcefile
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.builtin.tasks.forms import described
from ddpforge.errors import ForgeError, PluginError, UsageError
from ddpforge.interfaces import Task, Total
from ddpforge.training.one_turn import OneTurn

__all__ = ["FirstLook", "checked_loss", "checked_total", "checked_totals", "explain", "name_of"]


class FirstLook:
    """Calls a task's `loss` and `metrics`; what the first call for each use returns is checked.

    Later calls cost one look into a set.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seen: set[tuple[str, str]] = set()

    def loss(self, model: nn.Module, batch: Any, use: str) -> tuple[Tensor, Any]:
        """Calls the task's `loss`, and checks what it returns; `use` is "training" or "evaluation"."""
        if ("loss", use) in self._seen:
            return self._task.loss(model, batch)
        try:
            returned = self._task.loss(model, batch)
        except Exception as error:
            explain(error, self._task, described(batch), use)
            raise
        self._seen.add(("loss", use))
        return checked_loss(self._task, returned, gradients=use == "training")

    def metrics(self, outputs: Any, batch: Any, use: str) -> Mapping[str, Total]:
        """Calls the task's `metrics`, and checks what it returns."""
        totals = self._task.metrics(outputs, batch)
        if ("metrics", use) not in self._seen:
            self._seen.add(("metrics", use))
            checked_totals(self._task, totals)
        return totals


def explain(error: Exception, task: Task, batch: str, use: str) -> None:
    """Adds to an error in a task's loss, or in the model's forward pass, what they were given."""
    if not isinstance(error, ForgeError):
        error.add_note(f"in the first forward pass of {use} ({name_of(task)}.loss), of a batch of {batch}")


def checked_loss(task: Task, returned: Any, *, gradients: bool = True) -> tuple[Tensor, Any]:
    """Returns a task's loss and outputs; raises UsageError unless they are a summed loss and outputs."""
    where = f"{name_of(task)}.loss"
    pair = "return (loss, outputs): the loss summed over the batch, and what `metrics` reads"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UsageError(f"{where} returns {described(returned)}, not a pair (loss, outputs)", hints=[pair])
    loss, outputs = returned
    if not isinstance(loss, Tensor):
        raise UsageError(f"{where} returns {described(loss)} for the loss, not a tensor", hints=[pair])
    if loss.ndim:
        raise UsageError(
            f"{where} returns a loss of shape {list(loss.shape)}, not one number",
            hints=["return its sum over the batch: loss.sum()"],
        )
    if not loss.is_floating_point():
        raise UsageError(f"{where} returns {described(loss)} for the loss, not a floating-point number", hints=[pair])
    if gradients and torch.is_grad_enabled() and not loss.requires_grad:
        raise UsageError(
            f"{where} returns a loss that does not depend on any trainable parameter",
            hints=["compute it from the model's outputs, without detach(), item() or no_grad()"],
        )
    return loss, outputs


def checked_totals(task: Task, totals: Any) -> Mapping[str, Total]:
    """Returns a task's metrics as they are; raises PluginError unless they are totals by name."""
    if not isinstance(totals, Mapping):
        raise PluginError(f"{name_of(task)}.metrics returns {described(totals)}, not a dict of totals by name")
    for name, total in totals.items():
        checked_total(name, total)
    return totals


def checked_total(name: object, total: object) -> None:
    """Raises PluginError unless a metric is a total of 0-d tensors, or of such a tensor and a number."""
    what = type(total).__name__
    if isinstance(total, Total):
        parts = (("sum", total.sum, Tensor), ("count", total.count, Tensor | int | float))
        wrong = [
            f"Total with {described(value)} for its {part}"
            for part, value, wanted in parts
            if not isinstance(value, wanted) or (isinstance(value, Tensor) and value.ndim)
        ]
        if not wrong:
            return
        what = wrong[0]
    raise PluginError(
        f"metric `{name}` is a {what}, and must be a Total of a tensor and a count",
        hints=["return Total(values.sum(), len(values)): means are taken once, over all batches and ranks"],
    )


# ---------------------------------------------------------------------------------------------- in words
def name_of(part: object) -> str:
    """A component as people know it: its class, and the file of code that is not installed."""
    kind = type(part.task if isinstance(part, OneTurn) else part)
    if not kind.__module__.startswith("ddpforge_local_"):
        return kind.__qualname__
    return f"{os.path.basename(getsourcefile(kind) or '')}:{kind.__qualname__}"
