"""Process groups of a run, and their collective operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ddpforge.interfaces.metric import Metric, SampleColumns, Total

__all__ = ["Ranks", "World"]

T = TypeVar("T")


class Ranks(ABC):
    """Process group; a single process is a group too.

    Every method is collective: all ranks of the group call it, in the same order. If a rank is gone, the others raise
    RuntimeError, at the latest after `train.collective_timeout`.
    """

    rank: int
    size: int

    def __deepcopy__(self, memo: object) -> Self:
        """Returns self: a copy of an object that holds a group uses the same group."""
        return self

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes logs, trackers and manifests."""
        return self.rank == 0

    @abstractmethod
    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """All-reduces `values` by sum; returns a new tensor on the ranks' device, or on the host if it lacks float64.

        `values` has the same shape and dtype on all ranks.
        """

    def all_reduce_sum_async(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts an asynchronous all-reduce, which may overwrite `values`; costs less host time.

        Returns a function that waits for the sum and returns it; it may be called several times. The sum is on the
        device, or in host memory if it costs no communication.
        """
        summed = self.all_reduce_sum(values)
        return lambda: summed

    @abstractmethod
    def reduce_metrics(
        self, totals: Mapping[str, Total | SampleColumns | float], metrics: Mapping[str, Metric] = MappingProxyType({})
    ) -> dict[str, float]:
        """Sums numerators and counts over all ranks and divides them, in float64; returns NaN if the count is 0.

        Costs one all-reduce, and one all-gather for each column of rows. Waits for the device.

        Args:
            totals: Quantities by name. A plain number has the count 1, so the result is its mean over the ranks that
                have it. Ranks may have different names, or the same names in a different order.
            metrics: Metrics by name, the same on every rank. A total or rows of such a name are finished by the metric.
        """

    def all_reduce_mean(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Averages plain numbers as `reduce_metrics` does, but on the hosts, without waiting for a device."""
        return self.reduce_metrics(numbers)

    @abstractmethod
    def all_gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """All-gathers rows along the first dimension; returns all rows and the index of this rank's first row.

        Ranks may have different numbers of rows. Differentiable: the gradient of a rank's rows is the sum of their
        gradients on all ranks.
        """

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Broadcasts `value` from rank 0: a small picklable object, or a tensor of any dtype.

        A tensor has the same shape and dtype on every rank, and is filled in place.
        """

    @abstractmethod
    def all_gather_object(self, value: T) -> list[T]:
        """All-gathers `value`, a small picklable object; returns the list of all ranks' values."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Splits this process group into `groups`, lists of rank numbers; returns the new group of this rank.

        Every rank is in exactly one group, and the order of ranks is kept. Called on all ranks of the run, with the
        same groups.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank has called this."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Process groups and device of this process: all ranks of the run, and the data-parallel ranks.

    `global_ranks` and `dp_ranks` are the same unless a strategy splits one model over several ranks. Gradients are
    divided by the item count over `dp_ranks`, so ranks with the same data count once. Means and decisions are taken
    over `global_ranks`.
    """

    global_ranks: Ranks
    dp_ranks: Ranks
    device: torch.device
    local_rank: int

    @property
    def is_rank_zero(self) -> bool:
        """True on the one rank that writes logs, trackers and manifests."""
        return self.global_ranks.is_rank_zero
