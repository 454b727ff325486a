"""Sums and counts of the loss and the task's metrics, added up over micro-batches; ranks divide them once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar, overload

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

    def measure(self, outputs: Any, batch: Any) -> dict[str, Total | Rows]:
        """Computes the task's metrics of a batch, without gradients and in the outputs' own precision."""
        with torch.no_grad(), suspended_autocast():
            more = self._look.metrics(outputs, batch, self._use)
        return {name: _exact(name, quantity) for name, quantity in more.items()}

    def totals(
        self, micro: MicroBatch, result: tuple[Tensor, Mapping[str, Total | Rows] | None] | None
    ) -> dict[str, Total]:
        """Returns the totals that a micro-batch adds, given its loss and what `measure` made of its outputs.

        Rows are left out, as training has no time to gather them. A stand-in adds nothing. Where another rank has the
        loss (`result` is None), that rank counts it.
        """
        if result is None:
            return {}
        loss, measured = result
        if not micro.samples:
            return {"loss": Total(torch.zeros((), dtype=torch.float64), 0)}
        found = {name: one for name, one in (measured or {}).items() if isinstance(one, Total)}
        return {"loss": _exact("loss", Total(loss, self.items(micro))), **found}

    def quantities(self, micro: MicroBatch, batch: Any, result: tuple[Tensor, Any] | None) -> dict[str, Total | Rows]:
        """Returns the totals and rows that a micro-batch adds, given its loss and outputs; see `totals`."""
        measured = self.measure(result[1], batch) if result and micro.samples else {}
        return {**self.totals(micro, result and (result[0], {})), **measured}

    def items(self, micro: MicroBatch) -> Tensor | int:
        """The number of items that the micro-batch's loss sums over, which is counted once."""
        if not micro.samples:
            return 0
        counted = self._task.count(micro.data) if micro.items is None else micro.items
        return micro.samples if counted is None else counted


@contextmanager
def suspended_autocast() -> Iterator[None]:
    """Lets what is computed within be computed in the dtypes of its inputs."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


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


@overload
def _exact(name: str, quantity: Total) -> Total: ...
@overload
def _exact(name: str, quantity: Total | Rows) -> Total | Rows: ...
def _exact(name: str, quantity: Total | Rows) -> Total | Rows:
    """A copy, totals in float64, for adding up: 256 + 1 is 256 in bfloat16. CUDA graphs reuse outputs, copies stay."""
    checked_quantity(name, quantity)
    if isinstance(quantity, Rows):
        return Rows(*(column.detach().clone() for column in quantity.columns))
    count = quantity.count.detach().double() if isinstance(quantity.count, Tensor) else quantity.count
    values = quantity.sum.detach()
    return Total(values.clone() if values.dtype == torch.float64 else values.double(), count)
