"""Hypothesis strategies for shapes of tensors, regions, and sets of regions that cover a tensor."""

from math import prod

import numpy as np
from hypothesis import strategies as st

from ddpforge.interfaces.regions import Box, FlatRange, Shape, Simple, split


@st.composite
def shapes(draw: st.DrawFn, smallest: int = 0) -> Shape:
    return tuple(draw(st.lists(st.integers(smallest, 5), max_size=4)))


@st.composite
def regions(draw: st.DrawFn, shape: Shape) -> Simple:
    if draw(st.booleans()):
        start, stop = sorted(draw(st.tuples(*[st.integers(0, prod(shape))] * 2)))
        return FlatRange(start, stop)
    spans = [sorted(draw(st.tuples(*[st.integers(0, count)] * 2))) for count in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


@st.composite
def several(draw: st.DrawFn, count: int, smallest: int = 0) -> tuple[Shape, list[Simple]]:
    shape = draw(shapes(smallest))
    return shape, [draw(regions(shape)) for _ in range(count)]


@st.composite
def tilings(draw: st.DrawFn) -> tuple[Shape, list[Simple]]:
    """Draws regions that cover a tensor exactly: repeated cuts, along a dimension or anywhere in flat order."""
    shape = draw(shapes(1))
    found: list[Simple] = [Box((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        chosen = found.pop(draw(st.integers(0, len(found) - 1)))
        wide = [axis for axis, count in enumerate(chosen.size) if count > 1] if isinstance(chosen, Box) else []
        if wide and draw(st.booleans()):
            assert isinstance(chosen, Box)
            axis = draw(st.sampled_from(wide))
            at = draw(st.integers(1, chosen.size[axis] - 1))
            for begin, end in ((0, at), (at, chosen.size[axis])):
                offset, size = list(chosen.offset), list(chosen.size)
                offset[axis] += begin
                size[axis] = end - begin
                found.append(Box(tuple(offset), tuple(size)))
        else:
            at = draw(st.integers(0, chosen.numel))
            found += [part for span in ((0, at), (at, chosen.numel)) for part, _ in split(chosen, *span)]
    return shape, draw(st.permutations(found))


def elements(shape: Shape, region: Simple) -> np.ndarray:
    """Returns the flat indices of a region's elements in the region's shape and order, from numpy slicing."""
    line = np.arange(prod(shape))
    if isinstance(region, FlatRange):
        return line[region.start : region.stop]
    return np.array(
        line.reshape(shape)[tuple(slice(o, o + n) for o, n in zip(region.offset, region.size, strict=True))]
    )
