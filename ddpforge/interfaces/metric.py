"""Metrics that tasks report, and the totals and rows that they are computed from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Metric", "SampleColumns", "Total"]


@dataclass(frozen=True, slots=True)
class Total:
    """Numerator and denominator of a mean: both are summed over batches and ranks, and divided once at the end.

    Both are summed in float64, whatever their dtype. Ranks may report different quantities. `sum` may have any shape,
    the same on every rank, if the metric's `finish` converts it to numbers. `count` is one number, or has that shape.
    """

    sum: Tensor
    count: Tensor | float

    def __add__(self, other: Total) -> Total:
        return Total(self.sum + other.sum, self.count + other.count)


class SampleColumns:
    """One row per sample, for metrics that need all samples at once, such as the area under a curve.

    Columns are tensors of equal length. A column may also be a list with a tensor [n, …] for each sample, with another
    n for each, e.g. the boxes of an image. Columns are gathered from all ranks at the end of an evaluation. Rows that
    are logged in training skip such metrics, because gathering would take too long.
    """

    def __init__(self, *columns: Tensor | list[Tensor]) -> None:
        self._batches = [columns]

    def __add__(self, other: SampleColumns) -> SampleColumns:
        both = SampleColumns()
        both._batches = [*self._batches, *other._batches]
        return both

    @property
    def newest(self) -> tuple[Tensor | list[Tensor], ...]:
        """Returns the columns of the batch that was added last."""
        return self._batches[-1]

    @property
    def columns(self) -> tuple[Tensor | list[Tensor], ...]:
        """Returns each column, concatenated over all batches."""
        return tuple(_joined(parts) for parts in zip(*self._batches, strict=True))


def _joined(parts: Sequence[Any]) -> Tensor | list[Tensor]:
    """Returns the parts of a column as one: tensors are concatenated, lists are joined."""
    import torch

    return [one for part in parts for one in part] if isinstance(parts[0], list) else torch.cat([*parts])


class Metric(ABC):
    """Quantity computed from a task's outputs: a mean over samples, or the result of `finish` on a total or rows.

    Checkpoint retention and callbacks use `lower_is_better`; None: derived from the name.
    """

    name: str
    lower_is_better: bool | None = None

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Total | SampleColumns:
        """Returns the sum over the batch and its number of items, or the batch's rows.

        Must not need gradients or wait for the device. Not called for padding batches.
        """

    def finish(self, sum: Any, count: Any) -> float | Mapping[str, float]:
        """Returns the number reported as `name`, or several as `name/KEY`, from the sums over all batches and ranks.

        Called on every rank with float64 tensors on the CPU. Not called if the count is 0: the result is then NaN. For
        a metric of rows the arguments are its columns instead: real numbers in float64, integers in int64. A column of
        lists is a list with the tensor of each sample.
        """
        return float(sum / count)
