"""Divides the writing of tensors that several ranks hold among these ranks."""

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

from ddpforge.interfaces.regions import FlatRange, TensorShard

K = TypeVar("K", bound=Any)

_SMALLEST = 1 << 20  # bytes: less is not worth a cut


class Extent(NamedTuple):
    """Size of a tensor."""

    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Returns the size of its contents in bytes."""
        return self.numel * self.itemsize


def deal(extents: Mapping[K, Extent], *, rank: int, ranks: int, smallest: int = _SMALLEST) -> dict[K, FlatRange]:
    """Returns the elements of each tensor that `rank` writes; all ranks together write every element once.

    The tensors are concatenated in the order of their names and cut into `ranks` equal pieces. A cut that is less than
    `smallest` bytes from an end of a tensor moves there, so that small tensors stay whole. All ranks must pass the
    same extents.
    """
    names = sorted(extents)
    ends = list(accumulate(extents[name].nbytes for name in names))
    total = ends[-1] if ends else 0

    def cut(number: int) -> int:
        """Returns the first byte of the piece that rank `number` writes."""
        position = total * number // ranks
        if not 0 < position < total:
            return position
        at = bisect_right(ends, position)
        extent = extents[names[at]]
        begin, end = ends[at] - extent.nbytes, ends[at]
        if min(position - begin, end - position) < smallest:
            return begin if position - begin <= end - position else end
        return position

    first, last = cut(rank), cut(rank + 1)
    found = {}
    for name, end in zip(names, ends, strict=True):
        extent = extents[name]
        begin = end - extent.nbytes
        start, stop = max(first, begin), min(last, end)
        found[name] = FlatRange((start - begin) // extent.itemsize, (stop - begin) // extent.itemsize)
        if start >= stop:
            found[name] = FlatRange(0, 0)
    return found


def divide(parts: Mapping[K, TensorShard], *, rank: int, ranks: int) -> dict[K, list[TensorShard]]:
    """Divides parts that `ranks` ranks hold, including whole tensors; returns the pieces that `rank` writes."""
    extents = {name: Extent(part.tensor.numel(), part.tensor.itemsize) for name, part in parts.items()}
    dealt = deal(extents, rank=rank, ranks=ranks)
    return {
        name: [part] if dealt[name].numel == part.tensor.numel() else part.slice(dealt[name].start, dealt[name].stop)
        for name, part in parts.items()
    }
