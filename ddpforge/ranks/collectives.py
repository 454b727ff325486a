"""Ranks that talk over torch.distributed, and one process that talks to nobody."""

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
from ddpforge.interfaces import Metric, Ranks, Rows, Total
from ddpforge.ranks.means import Means

__all__ = ["Alone", "Connected", "Group"]

T = TypeVar("T")
_CPU = torch.device("cpu")


class Connected(Ranks):
    """Ranks on one kind of device, whose means and gathered rows are made of sums and of small objects.

    A subclass adds up tensors, fills in rank 0's, and lists small objects.
    """

    def __init__(self, rank: int, size: int, device: torch.device = _CPU) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._means, self._averages = Means(self, self._add_up), Means(self, self._add_up_on_host)

    def mean(
        self, totals: Mapping[str, Total | Rows | float], metrics: Mapping[str, Metric] = MappingProxyType({})
    ) -> dict[str, float]:
        """In one all-reduce, but for names that ranks have not heard of yet, and rows."""
        return self._means(totals, metrics)

    def average(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """In one all-reduce between hosts, but for names that ranks have not heard of yet."""
        return self._averages(numbers, {})

    def gather(self, rows: Tensor) -> tuple[Tensor, int]:
        """Counts each rank's rows, in one small sum; then gathers them, filled up to as many as the largest has."""
        sizes = torch.zeros(self.size, dtype=torch.int64)
        sizes[self.rank] = len(rows)
        counts: list[int] = self.sum(sizes).tolist()
        gathered: Tensor = _Gather.apply(rows, self, counts)
        return gathered, sum(counts[: self.rank])

    def gather_alike(self, rows: Tensor) -> Tensor:
        """Gathers rows of which all ranks have as many, without counting; gradients flow back as from `gather`."""
        gathered: Tensor = _Gather.apply(rows, self, [len(rows)] * self.size)
        return gathered

    def collect(self, rows: Tensor) -> Tensor:
        """Concatenates every rank's rows, of which all have as many: here as a sum in which each fills in its own."""
        everything = rows.new_zeros(self.size, *rows.shape)
        everything[self.rank] = rows
        return self.sum(everything).flatten(0, 1)

    def share_out(self, rows: Tensor) -> Tensor:
        """Adds up `rows` over ranks and returns this rank's part, of as many equal ones as there are ranks."""
        return self.sum(rows).chunk(self.size)[self.rank]

    def broadcast(self, value: T) -> T:
        """A tensor is filled in place."""
        if not isinstance(value, Tensor):
            return self._object_of_rank_0(value)
        if value.numel() and self.size > 1:
            _share(value, self)
        return value

    def _add_up(self, values: Tensor) -> Tensor:
        """Adds up over ranks where the result is used at once; may use the memory of `values`."""
        return self.sum(values)

    def _add_up_on_host(self, values: Tensor) -> Tensor:
        """The same of values on the host."""
        return self._add_up(values)

    @abstractmethod
    def bytes_of_rank_0(self, values: Tensor) -> None:
        """Fills `values` (uint8, one dimension, contiguous) with those of rank 0."""

    def _object_of_rank_0(self, value: T) -> T:
        return self.everyone(value)[0]


def _share(tensor: Tensor, ranks: Connected) -> None:
    """Fills `tensor` with rank 0's values, in place.

    They travel as bytes: gloo knows neither int16 nor float8, NCCL neither int16 nor complex numbers.
    """
    held = tensor.detach().resolve_conj().resolve_neg().contiguous()
    ranks.bytes_of_rank_0(held.view(-1).view(torch.uint8))
    if held.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(held)


class _Gather(torch.autograd.Function):
    """Every rank's rows; backward gives each rank the sum of the gradients that all ranks have for its own."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: Connected, counts: list[int]) -> Tensor:
        ctx.ranks, ctx.counts = ranks, counts
        blocks = torch.split(ranks.collect(_filled(rows, max(counts))), max(counts) or 1)
        return torch.cat([block[:count] for block, count in zip(blocks, counts, strict=False)])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ranks, counts = ctx.ranks, ctx.counts
        blocks = torch.cat([_filled(block, max(counts)) for block in torch.split(gradient, counts)])
        return ranks.share_out(blocks)[: counts[ranks.rank]], None, None


def _filled(rows: Tensor, count: int) -> Tensor:
    """The rows, with zeros behind them to make `count`."""
    if len(rows) == count:
        return rows.contiguous()
    return torch.cat([rows, rows.new_zeros(count - len(rows), *rows.shape[1:])])


class Alone(Connected):
    """One process: everything that all ranks say together is what it says itself."""

    def __init__(self, device: torch.device = _CPU) -> None:
        super().__init__(0, 1, device)

    def sum(self, values: Tensor) -> Tensor:
        """The values, on the device."""
        return values.to(self.device, non_blocking=True)

    def everyone(self, value: T) -> list[T]:
        """The one value."""
        return [value]

    def bytes_of_rank_0(self, values: Tensor) -> None:
        """They are."""

    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """The only group."""
        return self

    def barrier(self) -> None:
        """There is nobody to wait for."""


class Group(Connected):
    """The ranks of a torch.distributed process group; objects travel on the host, over gloo."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device = _CPU,
        *,
        keeps: object = None,
        timeout: timedelta | None = None,
    ) -> None:
        """`keeps` is something that must live as long as the group; `timeout` holds in groups that are split off."""
        super().__init__(dist.get_rank(group), dist.get_world_size(group), device)
        self._group, self._keeps, self._timeout = group, keeps, timeout

    @classmethod
    def of_writers(cls, ranks: Ranks, timeout: timedelta) -> Ranks:
        """The same ranks over a gloo group of their own, for a thread that talks while training goes on."""
        if ranks.size == 1:
            return ranks
        return cls(cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=timeout)))

    def sum(self, values: Tensor) -> Tensor:
        """One all-reduce of a copy."""
        summed = values.detach().to(self.device, non_blocking=True, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=self._group)
        return summed

    def begin_sum(self, values: Tensor) -> Callable[[], Tensor]:
        """One all-reduce in place."""
        values = values.to(self.device, non_blocking=True)
        work: Any = dist.all_reduce(values, group=self._group, async_op=True)

        def wait() -> Tensor:
            work.wait()
            return values

        return wait

    def _add_up(self, values: Tensor) -> Tensor:
        """One all-reduce in place."""
        return self._add_up_on_host(values.to(self.device, non_blocking=True))

    def _add_up_on_host(self, values: Tensor) -> Tensor:
        """One all-reduce where the values are: over gloo, on the host."""
        dist.all_reduce(values, group=self._group)
        return values

    def collect(self, rows: Tensor) -> Tensor:
        """One all-gather."""
        rows = rows.to(self.device)
        everything = rows.new_empty(self.size * len(rows), *rows.shape[1:])
        compat.all_gather(everything, rows, self._group)
        return everything

    def share_out(self, rows: Tensor) -> Tensor:
        """One reduce-scatter."""
        mine = rows.new_empty(len(rows) // self.size, *rows.shape[1:])
        compat.reduce_scatter(mine, rows, self._group)
        return mine

    def bytes_of_rank_0(self, values: Tensor) -> None:
        """One broadcast."""
        dist.broadcast(values, group=self._group, group_src=0)

    def _object_of_rank_0(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, group=self._group, device=_CPU, group_src=0)
        return box[0]

    def everyone(self, value: T) -> list[T]:
        """One all-gather of what the values are pickled to."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """One torch.distributed group each; a rank by itself needs none."""
        mine = next(group for group in groups if self.rank in group)
        if len(mine) == self.size:
            return self
        several = [[dist.get_global_rank(self._group, rank) for rank in group] for group in groups if len(group) > 1]
        formed: Any = dist.new_subgroups_by_enumeration(several, timeout=self._timeout)[0] if several else None
        return Alone(self.device) if len(mine) == 1 else Group(formed, self.device, timeout=self._timeout)

    def barrier(self) -> None:
        """torch's own."""
        dist.barrier(group=self._group)
