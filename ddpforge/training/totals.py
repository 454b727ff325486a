"""Sums and counts of the loss and the task's metrics, added up over micro-batches; means are taken once, over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ddpforge.data import MicroBatch
from ddpforge.interfaces import Pass, Task, Total
from ddpforge.training.first_look import FirstLook, checked_total

__all__ = ["Meter", "add"]


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
        """The totals that a micro-batch adds; a stand-in adds nothing, under the same names.

        Where another rank has the loss, that rank counts it.
        """
        if result is None:
            return {}
        loss, outputs = result
        totals = {"loss": Total(loss.detach(), self.items(micro))}
        if metrics:
            with torch.no_grad():
                totals |= self._look.metrics(outputs, batch, self._use)
        if micro.samples:
            return {name: _exact(name, total) for name, total in totals.items()}
        return {name: Total(torch.zeros((), dtype=torch.float64), 0) for name in totals}

    def items(self, micro: MicroBatch) -> Tensor | int:
        """The number of items that the micro-batch's loss sums over."""
        if not micro.samples:
            return 0
        counted = self._task.count(micro.data)
        return micro.samples if counted is None else counted


def add(totals: dict[str, Total], more: Mapping[str, Total]) -> None:
    """Adds `more` to `totals`, by name."""
    for name, total in more.items():
        before = totals.get(name)
        totals[name] = total if before is None else Total(before.sum + total.sum, before.count + total.count)


def _exact(name: str, total: Total) -> Total:
    """A copy in float64, for adding up: 256 + 1 is 256 in bfloat16. CUDA graphs reuse their outputs, copies stay."""
    checked_total(name, total)
    count = total.count.detach().double() if isinstance(total.count, Tensor) else total.count
    return Total(total.sum.detach().to(torch.float64, copy=True), count)
