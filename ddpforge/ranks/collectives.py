"""Implementations of `Ranks`: over torch.distributed, and for a single process."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ddpforge import compat
from ddpforge.interfaces import Metric, Ranks, SampleColumns, Total, device_kind
from ddpforge.ranks.metric_reduction import MetricReduction

__all__ = ["CollectiveRanks", "ProcessGroup", "SingleRank"]

T = TypeVar("T")
_CPU = torch.device("cpu")


class CollectiveRanks(Ranks):
    """Base of `Ranks` that builds means and gathered rows from sums and from small objects.

    A subclass implements the sum of tensors, the broadcast of bytes, and the all-gather of small objects.
    """

    def __init__(self, rank: int, size: int, device: torch.device = _CPU) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._means, self._averages = MetricReduction(self, self._add_up), MetricReduction(self, self._add_up_on_host)

    def reduce_metrics(
        self, totals: Mapping[str, Total | SampleColumns | float], metrics: Mapping[str, Metric] = MappingProxyType({})
    ) -> dict[str, float]:
        """Divides sums by counts over all ranks. One all-reduce, plus more for new names and for rows."""
        return self._means(totals, metrics)

    def all_reduce_mean(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """Averages numbers over ranks. One all-reduce in host memory, plus more for new names."""
        return self._averages(numbers, {})

    def all_gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Gathers rows: exchanges the number of rows by one small sum, then gathers rows padded to the largest."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(rows)
        counts: list[int] = self.all_reduce_sum(sizes).tolist()
        gathered: Tensor = _Gather.apply(rows, self, counts)
        return gathered, sum(counts[: self.rank])

    def all_gather_equal_autograd(self, rows: Tensor) -> Tensor:
        """Gathers rows of equal number on all ranks, without counting; gradients flow back as from `all_gather`."""
        gathered: Tensor = _Gather.apply(rows, self, [len(rows)] * self.size)
        return gathered

    def all_gather_equal(self, rows: Tensor) -> Tensor:
        """Concatenates the rows of all ranks, of equal number. Here a sum, to which each rank adds its own rows."""
        everything = rows.new_zeros(self.size, *rows.shape)
        everything[self.rank] = rows
        return self.all_reduce_sum(everything).flatten(0, 1)

    def reduce_scatter_sum(self, rows: Tensor) -> Tensor:
        """Sums `rows` over ranks, cuts the sum into `size` equal parts, and returns this rank's part."""
        return self.all_reduce_sum(rows).chunk(self.size)[self.rank]

    def broadcast(self, value: T) -> T:
        """Broadcasts rank 0's value; fills a tensor in place."""
        if not isinstance(value, Tensor):
            return self._broadcast_object(value)
        if value.numel() and self.size > 1:
            # Sent as bytes: gloo supports neither int16 nor float8, NCCL neither int16 nor complex numbers.
            held = value.detach().resolve_conj().resolve_neg().contiguous()
            self.broadcast_bytes(held.view(-1).view(torch.uint8))
            if held.data_ptr() != value.data_ptr():
                value.detach().copy_(held)
        return value

    def _place(self, values: Tensor) -> torch.device:
        """Returns the device on which `values` are reduced: the ranks', or the host for float64 that it lacks."""
        lacks = values.dtype == torch.float64 and not device_kind(self.device).has_float64
        return _CPU if lacks else self.device

    def _add_up(self, values: Tensor) -> Tensor:
        """Sums over ranks for immediate use; may overwrite `values`."""
        return self.all_reduce_sum(values)

    def _add_up_on_host(self, values: Tensor) -> Tensor:
        """Sums values in host memory over ranks; may overwrite `values`."""
        return self._add_up(values)

    @abstractmethod
    def broadcast_bytes(self, values: Tensor) -> None:
        """Fills `values` (uint8, one dimension, contiguous) with the values of rank 0."""

    def _broadcast_object(self, value: T) -> T:
        return self.all_gather_object(value)[0]


class _Gather(torch.autograd.Function):
    """Rows of all ranks. Backward returns to each rank the sum of all ranks' gradients for its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: CollectiveRanks, counts: list[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        blocks = torch.split(ranks.all_gather_equal(_filled(rows, max(counts))), max(counts) or 1)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=False)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks, counts = ctx.ranks, ctx.counts
        blocks = torch.cat([_filled(block, max(counts)) for block in torch.split(gradient, counts)])
        return ranks.reduce_scatter_sum(blocks)[: counts[ranks.rank]], None, None


def _filled(rows: Tensor, count: int) -> Tensor:
    """Returns the rows, padded with zeros to `count` rows."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


class SingleRank(CollectiveRanks):
    """Single process: each collective returns its own input."""

    def __init__(self, device: torch.device = _CPU) -> None:
        super().__init__(0, 1, device)

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Returns the values, on the device."""
        return values.to(self._place(values), non_blocking=True)

    def all_reduce_sum_async(self, values: Tensor) -> Callable[[], Tensor]:
        """Returns a function that returns the values where they are: kernels take a host number without a copy."""
        return lambda: values

    def all_gather_object(self, value: T) -> list[T]:
        """Returns a list with only this value."""
        return [value]

    def broadcast_bytes(self, values: Tensor) -> None:
        """Does nothing: the values are those of rank 0."""

    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Returns these ranks: there is only one group."""
        return self

    def barrier(self) -> None:
        """Returns at once: there are no other ranks."""


class ProcessGroup(CollectiveRanks):
    """Ranks of a torch.distributed process group; objects are sent over gloo, in host memory."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device = _CPU,
        *,
        keeps: object = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`keeps`: an object that must live as long as the group. `timeout`: the timeout of groups from `split`."""
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group, self._keeps, self._timeout = group, keeps, timeout

    @classmethod
    def of_writers(cls, ranks: Ranks, timeout: timedelta) -> Ranks:
        """Returns the same ranks on a separate gloo group, for a thread that communicates during training."""
        if ranks.size == 1:
            return ranks
        return cls(cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)))

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Sums a copy of the values over ranks, by one all-reduce."""
        place = self._place(values)
        summed = values.detach().to(place, non_blocking=True, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self._group)
        return summed

    def all_reduce_sum_async(self, values: Tensor) -> Callable[[], Tensor]:
        """Starts an asynchronous in-place all-reduce; the returned function waits for it and returns the sum."""
        if values.device.type == "cpu" and device_kind(self.device).pins:
            values = values.pin_memory()  # otherwise the copy blocks the host
        values = values.to(self._place(values), non_blocking=True)
        work: Any = dist.all_reduce(values, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return values

        return wait

    def _add_up(self, values: Tensor) -> Tensor:
        """Sums values by one all-reduce, on the device; in place if they are there already."""
        return self._add_up_on_host(values.to(self._place(values), non_blocking=True))

    def _add_up_on_host(self, values: Tensor) -> Tensor:
        """Sums values by one in-place all-reduce on the device where they are; in host memory over gloo."""
        dist.all_reduce(values, group=self._group)
        return values

    def all_gather_equal(self, rows: Tensor) -> Tensor:
        """Concatenates the rows of all ranks, by one all-gather."""
        rows = rows.to(self._place(rows))
        everything = rows.new_empty(self.size * len(rows), *rows.shape[1:])
        compat.all_gather(everything, rows, self._group)
        return everything

    def reduce_scatter_sum(self, rows: Tensor) -> Tensor:
        """Sums `rows` over ranks and returns this rank's part, by one reduce-scatter."""
        mine = rows.new_empty(len(rows) // self.size, *rows.shape[1:])
        compat.reduce_scatter(mine, rows, self._group)
        return mine

    def broadcast_bytes(self, values: Tensor) -> None:
        """Fills `values` with those of rank 0, by one broadcast."""
        dist.broadcast(values, group=self._group, group_src=0)

    def _broadcast_object(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, group=self._group, device=_CPU, group_src=0)
        return box[0]

    def all_gather_object(self, value: T) -> list[T]:
        """Gathers the pickled values of all ranks, by one all-gather of objects."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Forms a torch.distributed group for each of `groups` with more than one rank."""
        mine = next(group for group in groups if self.rank in group)
        if len(mine) == self.size:
            return self
        several = [[dist.get_global_rank(self._group, rank) for rank in group] for group in groups if len(group) > 1]
        formed: Any = dist.new_subgroups_by_enumeration(several, timeout=self._timeout)[0] if several else None
        return SingleRank(self.device) if len(mine) == 1 else ProcessGroup(formed, self.device, timeout=self._timeout)

    def barrier(self) -> None:
        """Waits for all ranks, by torch's barrier."""
        dist.barrier(group=self._group)
