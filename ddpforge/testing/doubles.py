"""Ranks as threads of one process, for tests: they communicate as the ranks of a run do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

import torch
from torch import Tensor

from ddpforge.interfaces import Ranks
from ddpforge.ranks.collectives import CollectiveRanks

__all__ = ["ThreadRanks", "in_threads"]

R = TypeVar("R")
T = TypeVar("T")


class _Table:
    """Values that all threads exchange."""

    def __init__(self, size: int) -> None:
        self.barrier = Barrier(size)
        self.values: list[Any] = [None] * size
        self.sums = 0


class ThreadRanks(CollectiveRanks):
    """Rank that is one of several threads; `sums` counts their reductions."""

    def __init__(self, rank: int, table: _Table) -> None:
        super().__init__(rank, table.barrier.parties)
        self._table = table

    @property
    def sums(self) -> int:
        """Returns the number of reductions so far."""
        return self._table.sums

    def all_reduce_sum(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks, added in the order of the ranks."""
        summed = torch.stack(self._exchange(values.detach().clone())).sum(0, dtype=values.dtype)
        self._table.sums += self.is_rank_zero
        self.barrier()
        return summed

    def all_gather_object(self, value: T) -> list[T]:
        """Returns the objects of all ranks, not copies."""
        return self._exchange(value)

    def broadcast_bytes(self, values: Tensor) -> None:
        """Copies the values of rank 0 into `values`."""
        values.copy_(self._exchange(values)[0])
        self.barrier()

    def split(self, groups: Sequence[Sequence[int]]) -> Ranks:
        """Returns the ranks of this rank's group, which exchange values among themselves."""
        mine = next(sorted(group) for group in groups if self.rank in group)
        tables = self._exchange(_Table(len(mine)))
        return ThreadRanks(mine.index(self.rank), tables[mine[0]])

    def barrier(self) -> None:
        """Waits for the other threads."""
        self._table.barrier.wait()

    def _exchange(self, value: T) -> list[T]:
        self._table.values[self.rank] = value
        self.barrier()
        found = list(self._table.values)
        self.barrier()
        return found


def in_threads(size: int, action: Callable[[Ranks], R]) -> list[R]:
    """Calls `action(ranks)` in a thread for each of `size` ranks; returns their results by rank.

    If a rank raises, the others stop waiting for it, and its error is raised.
    """
    table = _Table(size)

    def run(rank: int) -> R:
        try:
            return action(ThreadRanks(rank, table))
        except BaseException:
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception())]
    for error in sorted(errors, key=lambda error: type(error).__name__ == "BrokenBarrierError"):
        raise error
    return [future.result() for future in futures]
