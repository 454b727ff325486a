"""Sums and counts of the loss and the task's metrics, added up over micro-batches; ranks divide them once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError
from ddpforge.interfaces import Pass, Rows, Task, Total
from ddpforge.training.first_look import FirstLook, checked_quantity

__all__ = ["Meter", "add"]

Q = TypeVar("Q", bound=Total | Rows)


class Meter:
    """Calls a task for one use, training or evaluation, and counts what comes of micro-batches."""

    def __init__(self, task: Task, use: Literal["training", "evaluation"]) -> None:
        self._task, self._use = task, use
        self._look = FirstLook(task)

    def compute(self, module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
        """Seeds random numbers; returns the summed loss of a pass and its outputs."""
        one.seed()
        return self._look.loss(module, one.batch, self._use)

    def totals(
        self, micro: MicroBatch, batch: Any, result: tuple[Tensor, Any] | None, *, metrics: bool
    ) -> dict[str, Total]:
        """The totals that a micro-batch adds, without rows: training has no time to gather them."""
        found: Any = self.quantities(micro, batch, result, metrics=metrics)
        return {name: one for name, one in found.items() if isinstance(one, Total)} if metrics else found

    def quantities(
        self, micro: MicroBatch, batch: Any, result: tuple[Tensor, Any] | None, *, metrics: bool
    ) -> dict[str, Total | Rows]:
        """The totals and rows that a micro-batch adds; a stand-in adds nothing, and no metric is asked about it.

        Where another rank has the loss, that rank counts it.
        """
        if result is None:
            return {}
        loss, outputs = result
        if not micro.samples:
            return {"loss": Total(torch.zeros((), dtype=torch.float64), 0)}
        found: dict[str, Total | Rows] = {"loss": _exact("loss", Total(loss, self.items(micro)))}
        if metrics:
            with torch.no_grad():
                more = self._look.metrics(outputs, batch, self._use)
            found |= {name: _exact(name, quantity) for name, quantity in more.items()}
        return found

    def items(self, micro: MicroBatch) -> Tensor | int:
        """The number of items that the micro-batch's loss sums over, which is counted once."""
        if not micro.samples:
            return 0
        counted = self._task.count(micro.data) if micro.items is None else micro.items
        return micro.samples if counted is None else counted


def add(quantities: dict[str, Q], more: Mapping[str, Q]) -> None:
    """Adds `more` to `quantities`, by name."""
    for name, quantity in more.items():
        before: Any = quantities.get(name)
        quantities[name] = quantity if before is None else _refuse_another(name, before, quantity) + quantity


def _refuse_another(name: str, before: Any, quantity: Total | Rows) -> Any:
    """Returns `before`; raises PluginError unless `quantity`, of another batch, can be added to it."""
    if type(before) is type(quantity) and _shapes(before) == _shapes(quantity):
        return before
    raise PluginError(
        f"metric `{name}` is now {_described(before)}, now {_described(quantity)}, which cannot be added up",
        hints=["return the same form whatever is in the batch"],
    )


def _shapes(quantity: Total | Rows) -> list[torch.Size]:
    return [quantity.sum.shape] if isinstance(quantity, Total) else [x.shape[1:] for x in quantity.newest]


def _described(quantity: Total | Rows) -> str:
    shapes = ", ".join(str(list(shape)) for shape in _shapes(quantity))
    return f"a Total of shape {shapes}" if isinstance(quantity, Total) else f"Rows of shape {shapes}"


def _exact(name: str, quantity: Total | Rows) -> Total | Rows:
    """A copy, totals in float64, for adding up: 256 + 1 is 256 in bfloat16. CUDA graphs reuse outputs, copies stay."""
    checked_quantity(name, quantity)
    if isinstance(quantity, Rows):
        return Rows(*(column.detach().clone() for column in quantity.columns))
    count = quantity.count.detach().double() if isinstance(quantity.count, Tensor) else quantity.count
    values = quantity.sum.detach()
    return Total(values.clone() if values.dtype == torch.float64 else values.double(), count)
