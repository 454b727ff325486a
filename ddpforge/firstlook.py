"""Looks closely at a task's first batch, loss and totals, so that what has the wrong form is told in words."""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import getsourcefile
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.errors import ForgeError, UsageError
from ddpforge.interfaces import Task, Total
from ddpforge.tasks.forms import described

__all__ = ["FirstLook", "checked_loss", "checked_totals", "explain", "name_of"]


class FirstLook:
    """Calls a task's `loss` and `metrics`; what the first call for each use returns is checked.

    Later calls cost one look into a set.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._seen: set[tuple[str, str]] = set()

    def loss(self, model: nn.Module, batch: Any, use: str) -> tuple[Tensor, Any]:
        """What the task's `loss` returns; `use` is "training" or "evaluation"."""
        if ("loss", use) in self._seen:
            return self._task.loss(model, batch)
        try:
            returned = self._task.loss(model, batch)
        except Exception as error:
            explain(error, self._task, batch, use)
            raise
        self._seen.add(("loss", use))
        return checked_loss(self._task, returned, gradients=use == "training")

    def metrics(self, outputs: Any, batch: Any, use: str) -> Mapping[str, Total]:
        """What the task's `metrics` returns."""
        totals = self._task.metrics(outputs, batch)
        if ("metrics", use) not in self._seen:
            self._seen.add(("metrics", use))
            checked_totals(self._task, totals)
        return totals


def explain(error: Exception, task: Task, batch: Any, use: str) -> None:
    """Adds to an error in a task's loss, or in the model's forward pass, what they were given."""
    if not isinstance(error, ForgeError):
        error.add_note(f"in the first forward pass of {use} ({name_of(task)}.loss); the batch: {described(batch)}")


def checked_loss(task: Task, returned: Any, *, gradients: bool = True) -> tuple[Tensor, Any]:
    """What a task's `loss` returned, if it is a summed loss and outputs; raises UsageError otherwise."""
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


def checked_totals(task: Task, totals: Any) -> None:
    """Raises UsageError unless a task's `metrics` returned totals by name."""
    where = f"{name_of(task)}.metrics"
    if not isinstance(totals, Mapping):
        raise UsageError(f"{where} returns {described(totals)}, not a dict of Total(sum, count) by name")
    for name, total in totals.items():
        if not isinstance(name, str):
            raise UsageError(f"{where} names a metric {name!r}; names are text")
        if not isinstance(total, Total):
            raise UsageError(
                f"{where}: `{name}` is {described(total)}, not a Total",
                hints=[f"return {{{name!r}: Total(sum, count)}}: the sum over the batch, and how many items it covers"],
            )
        for part, value in (("sum", total.sum), ("count", total.count)):
            if not isinstance(value, Tensor | Number) or (isinstance(value, Tensor) and value.ndim):
                raise UsageError(f"{where}: the {part} of `{name}` is {described(value)}, not one number")


# ---------------------------------------------------------------------------------------------- in words
def name_of(part: object) -> str:
    """A component as people know it: its class, and the file of code that is not installed."""
    kind = type(part)
    if not kind.__module__.startswith("ddpforge_local_"):
        return kind.__qualname__
    return f"{os.path.basename(getsourcefile(kind) or '')}:{kind.__qualname__}"
