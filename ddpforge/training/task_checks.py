"""Checks the form of a task's results: its loss and its metrics."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddpforge.components.errors import where_raised
from ddpforge.components.local_code import component_name
from ddpforge.data import MicroBatch
from ddpforge.errors import ForgeError, PluginError, UsageError, says_memory_is_full
from ddpforge.interfaces import SampleColumns, Task, Total
from ddpforge.interfaces.forms import described, holds_text
from ddpforge.training.consensus import EvaluationInterrupted
from ddpforge.training.stages import NotBuilt

log = logging.getLogger("ddpforge")

__all__ = [
    "CheckedTask",
    "check_whole",
    "checked_loss",
    "checked_metrics",
    "checked_quantity",
    "explain",
    "first_metrics",
    "naming_dataset",
]

_Loss = Callable[[nn.Module, Any], tuple[Any, Any]]


class CheckedTask:
    """Task with checks of `loss` and `metrics` at their first call, for training or for evaluation.

    After the first call, both are the task's own methods, so the checks cost later steps nothing. `loss` is another
    function in place of the task's `loss`.
    """

    def __init__(self, task: Task, use: Literal["training", "evaluation"], loss: _Loss | None = None) -> None:
        self.task, self._use, self._replacement = task, use, loss
        self.loss: _Loss = self._first_loss
        self.metrics: Callable[[Any, Any], Mapping[str, Total | SampleColumns]] = self._first_metrics

    def _first_loss(self, model: nn.Module, batch: Any) -> tuple[Any, Any]:
        loss_of = self._replacement or self.task.loss
        try:
            returned = loss_of(model, batch)
        except Exception as error:
            explain(error, self.task, batch, self._use)
            raise
        self.loss = loss_of
        loss, outputs = checked_loss(self.task, returned, gradients=self._use == "training")
        if self._use == "training":
            _warn_probabilities(self.task, outputs)
        return loss, outputs

    def _first_metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
        found = checked_metrics(self.task, first_metrics(self.task, outputs, batch))
        self.metrics = self.task.metrics
        return found


def first_metrics(task: Task, outputs: Any, batch: Any) -> Mapping[str, Total | SampleColumns]:
    """Calls a task's `metrics`; raises UsageError if a metric refuses the outputs and targets by a ValueError."""
    try:
        return task.metrics(outputs, batch)
    except ValueError as error:
        raise UsageError(f"{component_name(task)}.metrics: {error}", hints=where_raised(error)) from error


def explain(error: Exception, task: Task, batch: Any, use: str) -> None:
    """Adds notes to an error in a task's loss, or in the model's forward pass: the batch, and likely causes."""
    if isinstance(error, ForgeError):
        return
    form = described(batch).removeprefix("a list ").removeprefix("a tuple ")
    error.add_note(f"in the first forward pass of {use} ({component_name(task)}.loss), with the batch {form}")
    if isinstance(error, TypeError) and re.search(r"forward\(\) (missing|takes)", str(error)):
        error.add_note(
            "the task passes the inputs as one argument: give the other parameters of `forward` defaults, or write a "
            "task that passes them (ddpforge plugins new task NAME)"
        )
    if use == "evaluation" and isinstance(error, RuntimeError) and "does not require grad" in str(error):
        error.add_note(_DERIVATIVES)
    if isinstance(error, NotImplementedError) and '"forward"' in str(error):
        error.add_note(_FORWARD)
    if holds_text(batch):
        error.add_note(_TEXT)


@contextmanager
def naming_dataset(key: str) -> Iterator[None]:
    """Turns an error of a component into a UsageError that names the dataset of the evaluated batch, e.g. data.eval."""
    try:
        yield
    except (ForgeError, NotBuilt, EvaluationInterrupted):
        raise
    except Exception as error:
        if says_memory_is_full(error):
            raise
        raise UsageError(
            f"a batch of [{key}] cannot be evaluated: {type(error).__name__}: {error}",
            hints=[*getattr(error, "__notes__", ()), *where_raised(error)],
            key=key,
        ) from error


def _warn_probabilities(task: Task, outputs: Any) -> None:
    """Logs a warning if a model returns probabilities to a task that takes logits."""
    if not type(task).__module__.startswith("ddpforge.builtin.tasks.classification") or not isinstance(outputs, Tensor):
        return
    values = outputs.detach().float()
    if values.ndim != 2 or values.shape[1] < 2 or not values.numel() or values.is_meta:
        return
    if bool((values >= 0).all()) and bool(((values.sum(dim=1) - 1).abs() < 1e-2).all()):
        log.warning(
            "the model returns probabilities (each row sums to 1), but the task takes logits: remove the softmax at "
            "the end of the model, or it learns slowly"
        )


def checked_loss(task: Task, returned: Any, *, gradients: bool = True) -> tuple[Any, Any]:
    """Returns a task's loss and outputs; raises UsageError if their form is wrong.

    The loss may be None in evaluations, if the task does not have `evaluation_loss = True`.
    """
    where = f"{component_name(task)}.loss"
    pair = "return (loss, outputs): the loss summed over the batch, and what `metrics` reads"
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        raise UsageError(f"{where} returns {described(returned)}, not a pair (loss, outputs)", hints=[pair])
    loss, outputs = returned
    if loss is None and not gradients:
        if task.evaluation_loss is not True:
            return None, outputs
        pair = "if an evaluation has no loss, set evaluation_loss = False in the task"
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


def checked_metrics(task: Task, metrics: Any) -> Mapping[str, Total | SampleColumns]:
    """Returns a task's metrics unchanged; raises PluginError unless they are totals or rows by name."""
    if not isinstance(metrics, Mapping):
        raise PluginError(f"{component_name(task)}.metrics returns {described(metrics)}, not a dict of totals by name")
    for name, quantity in metrics.items():
        checked_quantity(name, quantity)
    return metrics


def checked_quantity(name: object, quantity: object) -> None:
    """Raises PluginError unless a metric is a Total of a tensor and a count of fitting shape, or SampleColumns."""
    if isinstance(quantity, Total):
        if wrong := _wrong(quantity.sum, quantity.count):
            raise PluginError(f"metric `{name}` is a Total with {wrong}", hints=[_TOTAL])
    elif not isinstance(quantity, SampleColumns):
        raise PluginError(
            f"metric `{name}` is a {type(quantity).__name__}, but must be a Total of a tensor and a count, or "
            "SampleColumns",
            hints=[_TOTAL],
        )
    else:
        _check_rows(name, quantity)


def _check_rows(name: object, rows: SampleColumns) -> None:
    for column in rows.newest:
        parts = column if isinstance(column, list) and column else [column]
        if not all(isinstance(part, Tensor) and part.ndim for part in parts):
            raise PluginError(
                f"metric `{name}` has SampleColumns of {described(column)}, not of tensors with rows", hints=[_ROWS]
            )
        if len({part.shape[1:] for part in parts if isinstance(part, Tensor)}) > 1:
            shapes = ", ".join(sorted({described(part) for part in parts}))
            raise PluginError(
                f"metric `{name}` has SampleColumns with a list of tensors that differ in more than their first size: "
                f"{shapes}",
                hints=["only the first size may differ between samples: [n, …]"],
            )
    if len({len(column) for column in rows.newest}) != 1:
        lengths = ", ".join(str(len(column)) for column in rows.newest) or "none"
        raise PluginError(
            f"metric `{name}` has SampleColumns with columns of different lengths: {lengths}", hints=[_ROWS]
        )


def _wrong(sum: Any, count: Any) -> str | None:
    """Describes the first error in the parts of a total; None if there is none."""
    if not isinstance(sum, Tensor):
        return f"{described(sum)} for its sum"
    if not isinstance(count, int | float | Tensor):
        return f"{described(count)} for its count"
    if isinstance(count, Tensor) and count.shape not in ((), sum.shape):
        return f"{described(count)} for its count, and {described(sum)} for its sum"
    return None


_DERIVATIVES = (
    "an evaluation calls the loss without gradients; a loss that needs derivatives must compute them within "
    "`with torch.enable_grad():`, for inputs that require gradients: `x = x.clone().requires_grad_()`"
)
_FORWARD = "write a method `forward` in the class that [model] names, or a task that calls parts of the model"
_ROWS = "return a row for each sample: SampleColumns(scores, targets)"
_TEXT = "the batch holds text; if the model receives it, make tensors of it in the dataset or its `collate(samples)`"
_TOTAL = "return Total(values.sum(), len(values)): means are taken once, over all batches and ranks"


# ---------------------------------------------------------------------------------------------- whole batches
def check_whole(task: Task, micro: MicroBatch) -> None:
    """Raises UsageError if the loss compares all samples of a batch, and a micro-batch is not the rank's whole part.

    Streams and orders may yield such micro-batches.
    """
    if task.whole_batch and (micro.samples == 0 or micro.number or not micro.last):
        raise UsageError(
            f"{component_name(task)} compares all samples of a batch with each other, "
            f"but a batch of {micro.step_samples} "
            "samples is not one forward pass on every rank",
            hints=["set train.drop_last = true, or let the sampler give every step train.global_batch samples"],
        )
