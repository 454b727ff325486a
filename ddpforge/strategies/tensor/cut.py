"""The share of a weight that one of several ranks holds: some of its rows or of its columns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddpforge.interfaces import Box, Pieces, Range, Region

__all__ = ["Cut", "share"]


def share(count: int, rank: int, ranks: int) -> tuple[int, int]:
    """The first of `count` that one of `ranks` gets, and the first that it does not: as many each, the last less."""
    each = -(-count // ranks)
    return min(rank * each, count), min((rank + 1) * each, count)


@dataclass(frozen=True)
class Cut:
    """A rank's share of a tensor of `shape`, cut in dimension `dim` (0 or 1): of each of its `parts` equal stretches.

    A weight that is several, one below the other (queries, keys and values), has as many parts.
    """

    shape: tuple[int, ...]
    dim: int
    rank: int
    ranks: int
    parts: int = 1

    def of(self, rank: int) -> Cut:
        """The share of another rank."""
        return replace(self, rank=rank)

    def spans(self) -> list[tuple[int, int]]:
        """The stretches of indices in `dim`, in order."""
        each = self.shape[self.dim] // self.parts
        start, stop = share(each, self.rank, self.ranks)
        return [(part * each + start, part * each + stop) for part in range(self.parts)]

    def take(self, whole: Tensor) -> Tensor:
        """A copy of the share of a tensor that is there as a whole."""
        return torch.cat([whole.narrow(self.dim, start, stop - start) for start, stop in self.spans()], self.dim)

    def region(self, start: int, stop: int) -> Region:
        """The region of the whole that rows `start` up to `stop` of the share are."""
        spans = _within(self.spans(), start, stop) if self.dim == 0 else [(start, stop)]
        boxes = tuple(self._box(first, last) for first, last in spans)
        return Pieces(boxes) if boxes else Range(0, 0)

    def _box(self, start: int, stop: int) -> Box:
        """The share's part of rows `start` up to `stop` of the whole."""
        offset, size = [start, *(0 for _ in self.shape[1:])], [stop - start, *self.shape[1:]]
        if self.dim:
            ((first, last),) = self.spans()  # of columns, a share is one stretch
            offset[self.dim], size[self.dim] = first, last - first
        return Box(tuple(offset), tuple(size))


def _within(spans: list[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """The indices in `spans`, counted through, from `start` up to `stop`."""
    found, before = [], 0
    for first, last in spans:
        low, high = max(start, before), min(stop, before + last - first)
        if low < high:
            found.append((first + low - before, first + high - before))
        before += last - first
    return found
