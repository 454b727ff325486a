"""Metrics that tasks report, and the totals and rows they are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Metric", "Rows", "Total"]


@dataclass(frozen=True, slots=True)
class Total:
    """A quantity on its way to a mean: add up `sum` and `count` over batches and ranks, divide once at the end.

    Both are added up in float64, whatever their dtype. Ranks may name different quantities. `sum` may have any shape,
    the same on every rank, if a metric's `finish` makes numbers of it; `count` is one number, or has that shape.
    """

    sum: Tensor
    count: Tensor | float

    def __add__(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.count + other.count)


class Rows:
    """A row for each sample, of a metric that must see all samples together, as the area under a curve does.

    Columns are tensors of equal length. They are gathered from all ranks when an evaluation ends; training rows,
    which are no time to gather, leave such a metric out.
    """

    def __init__(self, *columns: Tensor) -> None:
        self._batches = [columns]

    def __add__(self, other: Rows) -> Rows:
        both = Rows()
        both._batches = [*self._batches, *other._batches]
        return both

    @property
    def newest(self) -> tuple[Tensor, ...]:
        """The columns of the batch that was added last."""
        return self._batches[-1]

    @property
    def columns(self) -> tuple[Tensor, ...]:
        """Each column, over all batches that were added."""
        import torch

        return tuple(torch.cat(parts) for parts in zip(*self._batches, strict=True))


class Metric(ABC):
    """A quantity computed from a task's outputs over samples: a mean, or what `finish` makes of a total or of rows.

    `lower_is_better` says what is best for checkpoints and callbacks that watch the metric; None: its name tells.
    """

    name: str
    lower_is_better: bool | None = None

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Total | Rows:
        """The sum over the batch and how many items it covers, or its rows; no gradients, no waiting for the device.

        It is never called for a batch that only fills up.
        """

    def finish(self, sum: Tensor, count: Tensor) -> float | Mapping[str, float]:
        """Makes the number reported as `name`, or several as `name/KEY`, of what all batches and ranks add up to.

        Called on every rank with float64 tensors on the CPU, and not where nothing was counted: that is NaN. Of a
        metric of rows the arguments are its columns instead: real numbers in float64, whole ones in int64.
        """
        return float(sum / count)
