"""Looks closely at a task's first batch, loss and totals, so that what has the wrong form is told in words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import getsourcefile
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.builtin.tasks.forms import described, holds_text
from ddpforge.components.errors import where_raised
from ddpforge.components.local_code import PREFIX
from ddpforge.errors import ForgeError, PluginError, UsageError
from ddpforge.interfaces import Rows, Task, Total
from ddpforge.training.one_turn import OneTurn

__all__ = ["FirstLook", "checked_loss", "checked_metrics", "checked_quantity", "explain", "first_metrics", "name_of"]


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
            explain(error, self._task, batch, use)
            raise
        self._seen.add(("loss", use))
        return checked_loss(self._task, returned, gradients=use == "training")

    def metrics(self, outputs: Any, batch: Any, use: str) -> Mapping[str, Total | Rows]:
        """Calls the task's `metrics`, and checks what it returns."""
        if ("metrics", use) in self._seen:
            return self._task.metrics(outputs, batch)
        found = checked_metrics(self._task, first_metrics(self._task, outputs, batch))
        self._seen.add(("metrics", use))
        return found


def first_metrics(task: Task, outputs: Any, batch: Any) -> Mapping[str, Total | Rows]:
    """Calls a task's `metrics`, where a metric may find that outputs and targets are not what it takes."""
    try:
        return task.metrics(outputs, batch)
    except ValueError as error:
        raise UsageError(f"{name_of(task)}.metrics: {error}", hints=where_raised(error)) from error


def explain(error: Exception, task: Task, batch: Any, use: str) -> None:
    """Adds to an error in a task's loss, or in the model's forward pass, what they were given."""
    if isinstance(error, ForgeError):
        return
    error.add_note(f"in the first forward pass of {use} ({name_of(task)}.loss), of a batch of {described(batch)}")
    if use == "evaluation" and isinstance(error, RuntimeError) and "does not require grad" in str(error):
        error.add_note(_DERIVATIVES)
    if holds_text(batch):
        error.add_note(_TEXT)


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


def checked_metrics(task: Task, metrics: Any) -> Mapping[str, Total | Rows]:
    """Returns a task's metrics as they are; raises PluginError unless they are totals or rows by name."""
    if not isinstance(metrics, Mapping):
        raise PluginError(f"{name_of(task)}.metrics returns {described(metrics)}, not a dict of totals by name")
    for name, quantity in metrics.items():
        checked_quantity(name, quantity)
    return metrics


def checked_quantity(name: object, quantity: object) -> None:
    """Raises PluginError unless a metric is a total of a tensor and a count that go together, or rows."""
    if isinstance(quantity, Total):
        if wrong := _wrong(quantity.sum, quantity.count):
            raise PluginError(f"metric `{name}` is a Total with {wrong}", hints=[_TOTAL])
    elif not isinstance(quantity, Rows):
        raise PluginError(
            f"metric `{name}` is a {type(quantity).__name__}, and must be a Total of a tensor and a count, or Rows",
            hints=[_TOTAL],
        )
    else:
        _check_rows(name, quantity)


def _check_rows(name: object, rows: Rows) -> None:
    for column in rows.newest:
        if not isinstance(column, Tensor) or not column.ndim:
            raise PluginError(
                f"metric `{name}` has Rows of {described(column)}, not of tensors with rows", hints=[_ROWS]
            )
    if len({len(column) for column in rows.newest}) != 1:
        lengths = ", ".join(str(len(column)) for column in rows.newest) or "none"
        raise PluginError(f"metric `{name}` has Rows whose columns differ in length: {lengths}", hints=[_ROWS])


def _wrong(sum: Any, count: Any) -> str | None:
    """Describes what is wrong with the parts of a total."""
    if not isinstance(sum, Tensor):
        return f"{described(sum)} for its sum"
    if not isinstance(count, int | float | Tensor):
        return f"{described(count)} for its count"
    if isinstance(count, Tensor) and count.shape not in ((), sum.shape):
        return f"{described(count)} for its count, and {described(sum)} for its sum"
    return None


_DERIVATIVES = (
    "an evaluation calls the loss without gradients; one that needs derivatives computes them within "
    "`with torch.enable_grad():`, of inputs that require them: `x = x.clone().requires_grad_()`"
)
_ROWS = "return a row for each sample: Rows(scores, targets)"
_TEXT = "the batch holds text; if the model was given it, make tensors of it in the dataset or its `collate(samples)`"
_TOTAL = "return Total(values.sum(), len(values)): means are taken once, over all batches and ranks"


# ---------------------------------------------------------------------------------------------- in words
def name_of(part: object) -> str:
    """A component as people know it: its class, and the file of code that is not installed."""
    kind = type(part.task if isinstance(part, OneTurn) else part)
    if not kind.__module__.startswith(PREFIX):
        return kind.__qualname__
    return f"{os.path.basename(getsourcefile(kind) or '')}:{kind.__qualname__}"
