"""Regions of a tensor that ranks hold: intersects two of them, and checks if several cover the tensor exactly.

A region of a tensor is a `FlatRange` of its elements in row-major order, a `Box` (a rectangle in its N dimensions), or
`BoxList` (several boxes). The elements of a region are held in a tensor: one-dimensional for a range, of the box's size
for a box, and concatenated along the first dimension for pieces.

This module only computes indices. Tensors are sliced and copied by their own methods; torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FlatRange:
    """Elements from `start` up to `stop`, `stop` excluded."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Box:
    """Elements with an index of at least `offset` and less than `offset + size` in each dimension."""

    offset: Shape
    size: Shape

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return prod(self.size)


@dataclass(frozen=True, slots=True)
class BoxList:
    """Boxes that are concatenated along the first dimension in one tensor, e.g. rows of a fused weight."""

    boxes: tuple[Box, ...]

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return sum(box.numel for box in self.boxes)

    @property
    def size(self) -> Shape:
        """Returns the shape of the tensor that holds the pieces."""
        return (sum(box.size[0] for box in self.boxes), *self.boxes[0].size[1:])


Simple = FlatRange | Box
Region = Simple | BoxList


@dataclass(frozen=True, slots=True, eq=False)
class TensorShard:
    """Part of a tensor on one rank: the elements of `region` of a tensor of `shape`, on any device.

    `tensor` holds them in row-major order; for a box, with the box's size. If several ranks hold the same elements,
    this one is number `replica` of `replicas`; writers share the work among the replicas. `replica_group` names the
    group of these ranks, if the rank belongs to several groups of the same size.

    Raises:
        ValueError: `tensor`, `shape` and `region`, or `replica` and `replicas`, contradict each other.
    """

    tensor: Tensor
    shape: Shape
    region: Region
    replica: int = 0
    replicas: int = 1
    replica_group: str = ""

    def __post_init__(self) -> None:
        shape = tuple(self.shape)
        region = normal(shape, self.region)
        held = tuple(self.tensor.shape)
        if prod(held) != region.numel or (isinstance(region, Box | BoxList) and held != region.size):
            raise ValueError(f"a tensor of shape {list(held)} is not {region} of a tensor of shape {list(shape)}")
        if not 0 <= self.replica < self.replicas:
            raise ValueError(f"there is no replica {self.replica} among {self.replicas}")
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "region", region)

    @classmethod
    def whole(cls, tensor: Tensor, *, replica: int = 0, replicas: int = 1, among: str = "") -> TensorShard:
        """Returns a part that is the whole tensor."""
        if not 0 <= replica < replicas:
            raise ValueError(f"there is no replica {replica} among {replicas}")
        # Without `__init__`, which would check what holds by construction: a model may have 100,000 parameters.
        part, shape, put = object.__new__(cls), tuple(tensor.shape), object.__setattr__
        put(part, "tensor", tensor)
        put(part, "shape", shape)
        put(part, "region", whole(shape))
        put(part, "replica", replica)
        put(part, "replicas", replicas)
        put(part, "replica_group", among)
        return part

    def of(self, tensor: Tensor) -> TensorShard:
        """Returns the same part of another tensor that this rank holds in the same layout."""
        return TensorShard(tensor, self.shape, self.region, self.replica, self.replicas, self.replica_group)

    def elements(self, region: Region) -> Tensor:
        """Returns the elements in `region`, flattened; raises ValueError if this part lacks some of them.

        The result is a view if the memory layout allows it.
        """
        wanted = normal(self.shape, region)
        if wanted == self.region:
            return self.tensor.reshape(-1)
        if not (isinstance(wanted, FlatRange) and isinstance(self.region, FlatRange)):
            raise ValueError(f"of a tensor of shape {list(self.shape)}, this rank holds {self.region}, not {wanted}")
        if wanted.numel and not self.region.start <= wanted.start <= wanted.stop <= self.region.stop:
            raise ValueError(
                f"of a tensor of shape {list(self.shape)}, this rank holds {self.region}, not all of {wanted}"
            )
        return self.tensor.reshape(-1)[wanted.start - self.region.start :][: wanted.numel]

    def as_boxes(self) -> list[TensorShard]:
        """Splits this part into parts with ranges or boxes as regions; their tensors are views."""
        if not isinstance(self.region, BoxList):
            return [self]
        return [replace(self, tensor=held, region=box) for box, held in pieces(self.region, self.tensor)]

    @property
    def simple_region(self) -> Simple:
        """Returns the region, which must not be `BoxList`."""
        assert not isinstance(self.region, BoxList)
        return self.region

    def slice(self, start: int, stop: int) -> list[TensorShard]:
        """Returns the elements from `start` up to `stop` of this part as parts of the same tensor.

        Indices count within this part. Its region must not be a `BoxList`.
        """
        region = self.simple_region
        if start == stop:
            return [TensorShard(self.tensor.new_empty(0), self.shape, FlatRange(0, 0))]
        flat = None if isinstance(region, Box) else self.tensor.reshape(-1)
        parts = []
        for piece, _ in split(region, start, stop):
            tensor = self.tensor if flat is None else flat
            parts.append(TensorShard(view(self.shape, region, tensor, piece), self.shape, piece))
        return parts


# ---------------------------------------------------------------------------------------------- one region
def pieces(region: Region, held: Tensor) -> Iterator[tuple[Simple, Tensor]]:
    """Yields the ranges and boxes of a region, each with its view of `held`, the tensor of the whole region."""
    if not isinstance(region, BoxList):
        yield region, held
        return
    row = 0
    for box in region.boxes:
        yield box, held[row : row + box.size[0]]
        row += box.size[0]


def copy_from(tensor: Tensor, region: Region, target: Tensor) -> None:
    """Fills `target` with a region of a whole tensor."""
    for simple, part in pieces(region, target):
        held = part.view(-1) if isinstance(simple, FlatRange) else part
        copy(tuple(tensor.shape), whole(tuple(tensor.shape)), tensor.reshape(-1), simple, held)


@lru_cache(1024)
def whole(shape: Shape) -> FlatRange:
    """Returns the range of all elements of a tensor."""
    return FlatRange(0, prod(shape))


def normal(shape: Shape, region: Region) -> Region:
    """Returns the canonical form of a region: a box without gaps becomes a range.

    An empty region becomes `FlatRange(0, 0)`. Empty boxes are removed from a `BoxList`; a single remaining box replaces
    it.

    Raises:
        ValueError: The region is not part of a tensor of this shape.
    """
    if isinstance(region, FlatRange):
        if 0 <= region.start < region.stop <= whole(shape).stop:
            return region
        if not 0 <= region.start <= region.stop <= prod(shape):
            raise ValueError(f"{region} is not part of a tensor of shape {list(shape)}")
        return FlatRange(0, 0)
    if isinstance(region, BoxList):
        found = tuple(box for box in region.boxes if normal(shape, box).numel)
        return BoxList(found) if len(found) > 1 else normal(shape, found[0]) if found else FlatRange(0, 0)

    offset, size = region.offset, region.size
    if not len(offset) == len(size) == len(shape) or not all(
        0 <= begin <= begin + count <= total for begin, count, total in zip(offset, size, shape, strict=True)
    ):
        raise ValueError(f"{region} is not part of a tensor of shape {list(shape)}")
    if not region.numel:
        return FlatRange(0, 0)
    first = next((axis for axis, count in enumerate(size) if count > 1), len(size))
    if size[first + 1 :] != shape[first + 1 :]:  # the box has gaps after its first long dimension
        return region
    start = _position(shape, offset)
    return FlatRange(start, start + region.numel)


def held_shape(shape: Shape, region: Simple) -> Shape:
    """Returns the shape in which a region of a tensor is stored; a whole tensor keeps its own shape."""
    if isinstance(region, Box):
        return region.size
    return shape if region == whole(shape) else (region.numel,)


def boxes(shape: Shape, region: Simple) -> list[Box]:
    """Splits a region into boxes, in the order of its elements: at most 2·N - 1 boxes in N dimensions."""
    if isinstance(region, Box):
        return [region]
    if region.start >= region.stop:
        return []
    if not shape:
        return [Box((), ())]
    rest = shape[1:]
    inner = prod(rest)
    row, first = divmod(region.start, inner)
    last_row, last = divmod(region.stop, inner)
    if row == last_row:
        return _in_row(row, rest, first, last)

    head = _in_row(row, rest, first, inner) if first else []
    row += bool(first)
    middle = [Box((row, *(0,) * len(rest)), (last_row - row, *rest))] if row < last_row else []
    return head + middle + (_in_row(last_row, rest, 0, last) if last else [])


def _in_row(row: int, rest: Shape, start: int, stop: int) -> list[Box]:
    return [Box((row, *box.offset), (1, *box.size)) for box in boxes(rest, FlatRange(start, stop))]


def split(region: Simple, start: int, stop: int) -> list[tuple[Simple, int]]:
    """Returns the elements from `start` up to `stop` of a region as regions, each with its start within the region."""
    if isinstance(region, FlatRange):
        return [(FlatRange(region.start + start, region.start + stop), start)]
    found: list[tuple[Simple, int]] = []
    for box in boxes(region.size, FlatRange(start, stop)):
        offset = tuple(begin + further for begin, further in zip(region.offset, box.offset, strict=True))
        found.append((Box(offset, box.size), start))
        start += box.numel
    return found


def _strides(shape: Shape) -> Shape:
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _position(shape: Shape, index: Shape) -> int:
    return sum(i * stride for i, stride in zip(index, _strides(shape), strict=True))


# ---------------------------------------------------------------------------------------------- two regions
def overlaps(shape: Shape, one: Simple, other: Simple) -> list[Simple]:
    """Intersects two regions of a tensor. The result is a range if both are ranges, otherwise boxes."""
    if isinstance(one, FlatRange) and isinstance(other, FlatRange):
        start, stop = max(one.start, other.start), min(one.stop, other.stop)
        return [FlatRange(start, stop)] if start < stop else []
    pairs = ((a, b) for a in boxes(shape, one) for b in boxes(shape, other))
    return [common for a, b in pairs if (common := _common(a, b)) is not None]


def _common(one: Box, other: Box) -> Box | None:
    offset, size = [], []
    for a, n, b, m in zip(one.offset, one.size, other.offset, other.size, strict=True):
        begin, end = max(a, b), min(a + n, b + m)
        if begin >= end:
            return None
        offset.append(begin)
        size.append(end - begin)
    return Box(tuple(offset), tuple(size))


def view(shape: Shape, region: Simple, held: Tensor, part: Simple) -> Tensor:
    """Returns a view of the elements of `part` in `held`, the tensor of `region`; it has the shape of `part`."""
    if isinstance(region, FlatRange):
        if isinstance(part, FlatRange):
            return held[part.start - region.start : part.stop - region.start]
        step = held.stride(0)
        start = held.storage_offset() + (_position(shape, part.offset) - region.start) * step
        return held.as_strided(part.size, tuple(stride * step for stride in _strides(shape)), start)

    (part,) = boxes(shape, part)
    corners = zip(part.offset, part.size, region.offset, strict=True)
    return held[tuple(slice(begin - origin, begin - origin + count) for begin, count, origin in corners)]


def copy(shape: Shape, region: Simple, held: Tensor, target_region: Simple, target: Tensor) -> int:
    """Copies the intersection of two regions from `held` to `target`; returns the number of elements."""
    common = overlaps(shape, region, target_region)
    for part in common:
        view(shape, target_region, target, part).copy_(view(shape, region, held, part))
    return sum(part.numel for part in common)


# ---------------------------------------------------------------------------------------------- many regions
@dataclass(frozen=True, slots=True)
class Gap:
    """Element that is in `count` of several regions instead of exactly one."""

    index: Shape
    count: int

    def __str__(self) -> str:
        where = f"element {list(self.index)}" if self.index else "its only element"
        return f"{where} occurs {self.count} times" if self.count else f"{where} is missing"


def find_gap(shape: Shape, regions: Iterable[Simple]) -> Gap | None:
    """Returns the first element of a tensor that is not in exactly one of the regions; None if there is none.

    Raises ValueError if a region is not part of the tensor.
    """
    regions = [region for each in regions if (region := _simple(shape, each)).numel]
    ranges = [region for region in regions if isinstance(region, FlatRange)]
    if not prod(shape):
        return None
    if len(ranges) == len(regions):
        return _flaw_of_ranges(shape, ranges)
    found = _flaw_of_boxes(shape, [box for region in regions for box in boxes(shape, region)], 0)
    return None if found is None else Gap(*found)


def _simple(shape: Shape, region: Simple) -> Simple:
    found = normal(shape, region)
    assert not isinstance(found, BoxList)
    return found


def _flaw_of_ranges(shape: Shape, ranges: Sequence[FlatRange]) -> Gap | None:
    covered = 0
    for region in sorted(ranges, key=lambda each: each.start):
        if region.start != covered:
            covered = min(covered, region.start)
            break
        covered = region.stop
    if covered == prod(shape):
        return None
    index = tuple(covered // stride % count for stride, count in zip(_strides(shape), shape, strict=True))
    return Gap(index, sum(region.start <= covered < region.stop for region in ranges))


def _flaw_of_boxes(shape: Shape, found: Sequence[Box], axis: int) -> tuple[Shape, int] | None:
    """Cuts the tensor along `axis` into slabs that each box fills or misses completely; recurses into each slab."""
    if axis == len(shape):
        return None if len(found) == 1 else ((), len(found))
    if not found:
        return (0,) * (len(shape) - axis), 0
    for begin, inside in _slabs(shape[axis], found, axis):
        if (flawed := _flaw_of_boxes(shape, inside, axis + 1)) is not None:
            return (begin, *flawed[0]), flawed[1]
    return None


def _slabs(total: int, found: Sequence[Box], axis: int) -> Iterator[tuple[int, list[Box]]]:
    """Yields the first index of each slab, and the boxes in it."""
    begins: dict[int, list[int]] = {0: []}
    ends: dict[int, list[int]] = {}
    for number, box in enumerate(found):
        begins.setdefault(box.offset[axis], []).append(number)
        ends.setdefault(box.offset[axis] + box.size[axis], []).append(number)

    inside: dict[int, Box] = {}
    for position in sorted(begins.keys() | ends.keys() - {total}):
        for number in ends.get(position, ()):
            del inside[number]
        inside |= {number: found[number] for number in begins.get(position, ())}
        yield position, list(inside.values())
