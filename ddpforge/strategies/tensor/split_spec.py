"""Share of a weight on one of several ranks: some of its rows or columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddpforge.interfaces import Box, BoxList, FlatRange, Region

__all__ = ["SplitSpec", "share"]


def share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """Returns start and end (exclusive) of a rank's share of `count` items; shares are equal, but for the last."""
    each = -(-count // ranks)
    return min(rank * each, count), min((rank + 1) * each, count)


@dataclass(frozen=True)
class SplitSpec:
    """A rank's share of a tensor of `shape`, cut along dimension `dim` (0 or 1).

    A weight that concatenates several weights (queries, keys and values) has that number of `parts`; the share has its
    range of each part.
    """

    shape: tuple[int, ...]
    dim: int
    rank: int
    ranks: int
    parts: int = 1

    def of(self, rank: int) -> SplitSpec:
        """Returns the share of another rank."""
        return replace(self, rank=rank)

    def spans(self) -> list[tuple[int, int]]:
        """Returns the ranges of indices along `dim`, in order."""
        each = self.shape[self.dim] // self.parts
        start, stop = share(each, self.rank, self.ranks)
        return [(part * each + start, part * each + stop) for part in range(self.parts)]

    def take(self, whole: Tensor) -> Tensor:
        """Returns a copy of the share of a whole tensor."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.spans()], self.dim)

    def region(self, start: int, stop: int) -> Region:
        """Returns the region of the whole tensor for rows `start` to `stop` (exclusive) of the share."""
        spans = _within(self.spans(), start, stop) if self.dim == 0 else [(start, stop)]
        boxes = tuple(self._box(first, last) for first, last in spans)
        return BoxList(boxes) if boxes else FlatRange(0, 0)

    def _box(self, start: int, stop: int) -> Box:
        """Returns the share's part of rows `start` to `stop` (exclusive) of the whole tensor."""
        offset, size = [start, *(0 for _ in self.shape[1:])], [stop - start, *self.shape[1:]]
        if self.dim:
            ((first, last),) = self.spans()  # a share of columns is one range
            offset[self.dim], size[self.dim] = first, last - first
        return Box(tuple(offset), tuple(size))


def _within(spans: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Returns the indices number `start` to `stop` (exclusive) of all indices in `spans`, as ranges."""
    found, before = [], 0
    for first, last in spans:
        low, high = max(start, before), min(stop, before + last - first)
        if low < high:
            found.append((first + low - before, first + high - before))
        before += last - first
    return found
