"""Sums and counts of the loss and the task's metrics, added up over micro-batches; ranks divide them once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError
from ddpforge.interfaces import SampleColumns, Task, Total, device_kind, device_kinds

__all__ = ["add", "exact", "items_of", "loss_total", "suspended_autocast"]

Q = TypeVar("Q", bound=Total | SampleColumns)


def items_of(task: Task, micro: MicroBatch) -> Tensor | int:
    """Returns the number of items that the micro-batch's loss sums over, which is counted once."""
    if not micro.samples:
        return 0
    counted = task.count(micro.data) if micro.items is None else micro.items
    return micro.samples if counted is None else counted


def loss_total(loss: Tensor, items: Tensor | int) -> Total:
    """Returns a copy of a summed loss that can be added up, with its items; zero for padding samples."""
    if isinstance(items, int) and not items:
        return Total(torch.zeros((), dtype=torch.float64), 0)
    if isinstance(items, int) and loss.device.type == "cpu":
        return Total(loss.detach().to(torch.float64, copy=True), items)
    return _exact_total(Total(loss, items))


def exact(quantity: Total | SampleColumns) -> Total | SampleColumns:
    """Returns a copy that can be added up, with totals in float64, on the host if the device lacks it."""
    # CUDA graphs reuse the memory of outputs. In bfloat16, 256 + 1 is 256.
    if isinstance(quantity, SampleColumns):
        return SampleColumns(
            *(
                [one.detach().clone() for one in column] if isinstance(column, list) else column.detach().clone()
                for column in quantity.columns
            )
        )
    return _exact_total(quantity)


def _exact_total(total: Total) -> Total:
    count: Any = _wide(total.count) if isinstance(total.count, Tensor) else total.count
    return Total(_wide(total.sum), count)


def _wide(values: Tensor) -> Tensor:
    """Returns a copy of values in float64, on the host if their device lacks it."""
    values = values.detach()
    return (values if device_kind(values.device).has_float64 else values.cpu()).to(torch.float64, copy=True)


@contextmanager
def suspended_autocast() -> Iterator[None]:
    """Disables autocast inside: operations compute in the dtypes of their inputs."""
    with ExitStack() as stack:
        for device in [kind.type for kind in device_kinds()]:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def add(quantities: dict[str, Q], more: Mapping[str, Q]) -> None:
    """Adds `more` to `quantities`, by name."""
    for name, quantity in more.items():
        before: Any = quantities.get(name)
        quantities[name] = quantity if before is None else _reject_another(name, before, quantity) + quantity


def _reject_another(name: str, before: Any, quantity: Total | SampleColumns) -> Any:
    """Returns `before`; raises PluginError unless the `quantity` of another batch can be added to it."""
    if type(before) is type(quantity) and _shapes(before) == _shapes(quantity):
        return before
    raise PluginError(
        f"metric `{name}` is {_described(before)} for one batch and {_described(quantity)} for another, which cannot "
        "be added up",
        hints=["return the same form for every batch"],
    )


def _shapes(quantity: Total | SampleColumns) -> list[torch.Size]:
    if isinstance(quantity, Total):
        return [quantity.sum.shape]
    return [(x[0] if isinstance(x, list) else x).shape[1:] for x in quantity.newest]


def _described(quantity: Total | SampleColumns) -> str:
    shapes = ", ".join(str(list(shape)) for shape in _shapes(quantity))
    return f"a Total of shape {shapes}" if isinstance(quantity, Total) else f"SampleColumns of shape {shapes}"
