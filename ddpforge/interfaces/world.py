"""The processes of a run: who they are, and how they talk to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Self, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ddpforge.interfaces.metric import Metric, Rows, Total

__all__ = ["Ranks", "World"]

T = TypeVar("T")


class Ranks(ABC):
    """A group of processes that talk to each other; a single process is a group as well.

    Every method is collective: all ranks of the group call it, in the same order. When a rank is gone, the others raise
    RuntimeError, at the latest after `train.collective_timeout`.
    """

    rank: int
    size: int

    def __deepcopy__(self, memo: object) -> Self:
        """The ranks themselves: a copy of what holds them talks to the same."""
        return self

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs, trackers and manifests."""
        return self.rank == 0

    @abstractmethod
    def sum(self, values: Tensor) -> Tensor:
        """Adds up `values`, of one shape and dtype on all ranks; returns the sum, a new tensor on the ranks' device."""

    def begin_sum(self, values: Tensor) -> Callable[[], Tensor]:
        """Begins to add up as `sum` does, in less of the host's time; may use the memory of `values`.

        What it returns waits for the sum and gives it, any number of times.
        """
        summed = self.sum(values)
        return lambda: summed

    @abstractmethod
    def mean(
        self, totals: Mapping[str, Total | Rows | float], metrics: Mapping[str, Metric] = MappingProxyType({})
    ) -> dict[str, float]:
        """Divides sums by counts, both over all ranks and in float64; NaN where nothing was counted.

        A plain number counts once: what comes back is its mean over the ranks that have it. Where `metrics`, the same
        on every rank, has the name, that metric finishes it. Ranks may name different totals, or the same ones in
        another order. One all-reduce, and for each column of rows a gathering; waits for
        the device.
        """

    def average(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Averages plain numbers as `mean` does, but from host to host: waits for no device."""
        return self.mean(numbers)

    @abstractmethod
    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Concatenates every rank's rows, along the first dimension; also returns where this rank's own begin.

        Ranks may have different numbers of rows. Gradients flow back: that of a rank's rows is the sum of what all
        ranks computed for them.
        """

    @abstractmethod
    def broadcast(self, value: T) -> T:
        """Gives every rank rank 0's `value`: a small picklable object, or a tensor.

        A tensor has the same shape and dtype on every rank, and is filled in place; any dtype will do.
        """

    @abstractmethod
    def everyone(self, value: T) -> list[T]:
        """Lists every rank's `value`, a small picklable object, on every rank."""

    @abstractmethod
    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Splits the ranks into `groups`, lists of their numbers here; returns the one that this rank is in.

        Every rank is in one group, and keeps its order there. Called on all ranks of the run, with the same groups.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Waits until every rank has come here."""


@dataclass(frozen=True, kw_only=True)
class World:
    """The place of this process among all ranks and among those that see different data, and its device.

    `all` and `data` are the same unless a strategy splits one model over several ranks. Gradients are divided by what
    is counted over `data`: ranks that see the same data count once. Means and decisions are taken over `all`.
    """

    all: Ranks
    data: Ranks
    device: torch.device
    local_rank: int

    @property
    def is_main(self) -> bool:
        """True on the one rank that writes logs, trackers and manifests."""
        return self.all.is_main
