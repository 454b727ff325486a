"""Regions, compared with brute force: a mask of every element."""

from math import prod

import numpy as np
import pytest
import torch
from checkpoint.shapes import elements, several, tilings
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpforge.interfaces.regions import (
    Box,
    BoxList,
    FlatRange,
    Region,
    Shape,
    TensorShard,
    boxes,
    copy,
    find_gap,
    held_shape,
    normal,
    overlaps,
    split,
    whole,
)

quick = settings(max_examples=200, deadline=None, derandomize=True)


def mask(shape: Shape, found: list[Region]) -> np.ndarray:
    counts = np.zeros(prod(shape), int)
    for region in found:
        counts[elements(shape, region).ravel()] += 1
    return counts


@quick
@given(several(1))
def test_the_normal_form_has_the_same_elements_and_is_a_range_if_possible(
    case: tuple[Shape, list[Region]],
) -> None:
    shape, (region,) = case

    form = normal(shape, region)

    positions = elements(shape, region).ravel()
    assert elements(shape, form).ravel().tolist() == positions.tolist()
    gapless = bool((np.diff(positions) == 1).all())
    assert isinstance(form, FlatRange) is gapless
    assert form.numel == region.numel == len(positions)
    assert normal(shape, form) == form


@quick
@given(several(1))
def test_a_range_is_few_boxes_in_order(case: tuple[Shape, list[Region]]) -> None:
    shape, (region,) = case

    found = boxes(shape, region)

    assert len(found) <= max(2 * len(shape) - 1, 1)
    assert [i for box in found for i in elements(shape, box).ravel()] == elements(shape, region).ravel().tolist()


@quick
@given(several(1), st.data())
def test_split_returns_regions_of_any_interval_in_order(case: tuple[Shape, list[Region]], data: st.DataObject) -> None:
    shape, (region,) = case
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, region.numel)] * 2)))

    found = split(region, start, stop)

    positions = elements(shape, region).ravel()
    assert [i for each, _ in found for i in elements(shape, each).ravel()] == positions[start:stop].tolist()
    begins = np.cumsum([start] + [each.numel for each, _ in found]).tolist()
    assert [begin for _, begin in found] == begins[:-1]


@quick
@given(several(2), st.booleans())
def test_copy_writes_exactly_the_overlap_of_two_regions(case: tuple[Shape, list[Region]], sliced: bool) -> None:
    shape, (source, target) = case
    held = torch.from_numpy(elements(shape, source).copy())
    into = torch.full(elements(shape, target).shape, -1)
    if sliced:  # neither needs to be contiguous
        held, into = (torch.stack([x, x], -1)[..., 0] for x in (held, into))

    count = copy(shape, source, held, target, into)

    common = set(elements(shape, source).ravel().tolist()) & set(elements(shape, target).ravel().tolist())
    positions = elements(shape, target)
    assert into.tolist() == np.where(np.isin(positions, list(common)), positions, -1).tolist()
    assert count == len(common) == sum(region.numel for region in overlaps(shape, source, target))


@quick
@given(st.integers(1, 5).flatmap(several))
def test_find_gap_returns_the_first_element_not_covered_exactly_once(case: tuple[Shape, list[Region]]) -> None:
    shape, found = case
    counts = mask(shape, found)
    wrong = np.flatnonzero(counts != 1)

    flawed = find_gap(shape, found)

    if len(wrong):
        assert flawed is not None
        assert flawed.index == tuple(np.unravel_index(wrong[0], shape))
        assert flawed.count == counts[wrong[0]]
    else:
        assert flawed is None


@quick
@given(tilings(), st.data())
def test_an_exact_cover_has_no_gap_until_a_region_is_missing_or_doubled(
    case: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    shape, found = case
    assert find_gap(shape, found) is None

    chosen = data.draw(st.sampled_from([each for each in found if each.numel]))
    first = int(elements(shape, chosen).ravel()[0])
    for count, others in ((0, [each for each in found if each is not chosen]), (2, [*found, chosen])):
        flawed = find_gap(shape, others)
        assert flawed is not None
        assert (int(np.ravel_multi_index(flawed.index, shape)) if shape else 0, flawed.count) == (first, count)


@pytest.mark.parametrize(
    ("shape", "region"),
    [
        ((2, 3), FlatRange(0, 7)),
        ((2, 3), FlatRange(-1, 2)),
        ((2, 3), FlatRange(3, 2)),
        ((2, 3), Box((0, 0), (2, 4))),
        ((2, 3), Box((2, 0), (1, 1))),
        ((2, 3), Box((-1, 0), (1, 1))),
        ((2, 3), Box((0, 0), (1, -1))),
        ((2, 3), Box((0,), (1,))),
        ((), Box((0,), (1,))),
    ],
)
def test_regions_outside_of_the_tensor_are_refused(shape: Shape, region: Region) -> None:
    with pytest.raises(ValueError, match="is not part of a tensor of shape"):
        normal(shape, region)
    with pytest.raises(ValueError, match="is not part of a tensor of shape"):
        find_gap(shape, [region])


def test_a_gap_reports_its_element_and_count() -> None:
    assert str(find_gap((2, 3), [FlatRange(0, 4)])) == "element [1, 1] is missing"
    assert str(find_gap((2, 3), [whole((2, 3)), Box((0, 2), (2, 1))])) == "element [0, 2] occurs 2 times"
    assert str(find_gap((), [])) == "its only element is missing"


def test_a_thousand_boxes_are_checked_at_once() -> None:
    """Tests tensor-parallel columns of 1,000 ranks, and a grid of 32 × 32."""
    columns = [Box((0, 4 * i), (7, 4)) for i in range(1000)]
    grid = [Box((3 * i, 5 * j), (3, 5)) for i in range(32) for j in range(32)]

    assert find_gap((7, 4000), columns) is None
    assert find_gap((96, 160), grid) is None


# ---------------------------------------------------------------------------------------------- tensor shards
@quick
@given(several(1), st.data())
def test_a_shard_is_sliced_into_shards_of_the_same_tensor(
    case: tuple[Shape, list[Region]], data: st.DataObject
) -> None:
    shape, (region,) = case
    part = TensorShard(torch.from_numpy(elements(shape, region).copy()), shape, region)
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, region.numel)] * 2)))

    cut = part.slice(start, stop)

    for each in cut:
        assert each.tensor.flatten().tolist() == elements(shape, each.region).ravel().tolist()
    positions = elements(shape, region).ravel()[start:stop].tolist()
    assert [i for each in cut for i in each.tensor.flatten().tolist()] == positions


@pytest.mark.parametrize("held", [(5,), (3, 2), (6,)])
def test_a_shard_whose_tensor_does_not_fit_its_region_is_refused(held: Shape) -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape .* is not Box.* of a tensor of shape"):
        TensorShard(torch.zeros(held), (4, 4), Box((0, 1), (2, 3)))


def test_an_empty_slice_keeps_no_memory_alive() -> None:
    part = TensorShard.whole(torch.ones(40, 50).t())

    (nothing,) = part.slice(7, 7)

    assert nothing.tensor.untyped_storage().nbytes() == 0
    assert (nothing.shape, nothing.region) == ((50, 40), FlatRange(0, 0))


@quick
@given(several(2))
def test_elements_returns_a_view_of_held_elements_and_refuses_others(case: tuple[Shape, list[Region]]) -> None:
    """Returns any range within a range; of a box, or as a box, only the whole shard."""
    shape, (region, wanted) = case
    part = TensorShard(torch.from_numpy(elements(shape, region).copy()), shape, region)
    positions = elements(shape, wanted).ravel().tolist()
    held, form = (normal(shape, each) for each in (region, wanted))
    ranges = isinstance(held, FlatRange) and isinstance(form, FlatRange)

    if held == form or (ranges and set(positions) <= set(elements(shape, region).ravel().tolist())):
        found = part.elements(wanted)
        assert found.tolist() == positions
        found -= 1000
        assert sum(x < 0 for x in part.tensor.flatten().tolist()) == len(positions), (
            "they share the memory of the shard"
        )
    else:
        with pytest.raises(ValueError, match=r"this rank holds .*, not (all of )?"):
            part.elements(wanted)


def test_elements_includes_the_edges_of_a_range_and_nothing_beyond() -> None:
    part = TensorShard(torch.arange(2, 6), (8,), FlatRange(2, 6))

    assert part.elements(FlatRange(2, 4)).tolist() == [2, 3]
    assert part.elements(FlatRange(4, 6)).tolist() == [4, 5]
    assert part.elements(Box((3,), (2,))).tolist() == [3, 4]
    assert part.elements(FlatRange(7, 7)).tolist() == []
    for beyond in (FlatRange(1, 3), FlatRange(5, 7), FlatRange(0, 8), FlatRange(6, 8)):
        with pytest.raises(ValueError, match="not all of"):
            part.elements(beyond)


def test_of_keeps_region_and_replica_for_another_tensor() -> None:
    part = TensorShard(torch.zeros(2, 3), (4, 4), Box((0, 1), (2, 3)), 1, 3, "stages 0 and 2")
    momentum = torch.ones(2, 3)

    same = part.of(momentum)

    assert same.tensor is momentum
    assert (same.shape, same.region) == ((4, 4), Box((0, 1), (2, 3)))
    assert (same.replica, same.replicas, same.replica_group) == (1, 3, "stages 0 and 2")


def test_a_shard_has_a_replica_number_below_its_replicas() -> None:
    whole_one = TensorShard.whole(torch.zeros(2, 3), replica=1, replicas=2)

    assert (whole_one.region, whole_one.replica, whole_one.replicas) == (FlatRange(0, 6), 1, 2)
    assert (TensorShard.whole(torch.zeros(2)).replica, TensorShard.whole(torch.zeros(2)).replicas) == (0, 1)
    for replica, replicas in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"there is no replica {replica} among {replicas}"):
            TensorShard.whole(torch.zeros(2), replica=replica, replicas=replicas)


def test_a_whole_tensor_is_stored_in_its_shape_and_a_range_flat() -> None:
    assert held_shape((2, 3), whole((2, 3))) == (2, 3)
    assert held_shape((2, 3), FlatRange(0, 5)) == (5,)
    assert held_shape((2, 3), Box((0, 1), (2, 2))) == (2, 2)
    assert held_shape((), whole(())) == ()


# ---------------------------------------------------------------------------------------------- box lists
ROWS = BoxList((Box((0, 0), (1, 3)), Box((4, 0), (2, 3))))


def test_a_shard_of_a_box_list_becomes_shards_that_share_its_memory() -> None:
    tensor = torch.arange(9.0).view(3, 3)
    part = TensorShard(tensor, (6, 3), ROWS, 1, 2)
    first, second = part.as_boxes()
    assert (first.region, first.replica, first.replicas) == (FlatRange(0, 3), 1, 2)
    assert second.region == FlatRange(12, 18)
    second.tensor.zero_()
    assert tensor.tolist() == [[0.0, 1.0, 2.0], [0.0] * 3, [0.0] * 3]
    assert part.elements(ROWS).tolist() == tensor.flatten().tolist()


def test_a_list_of_one_box_is_that_box_and_an_empty_list_is_empty() -> None:
    assert normal((6, 3), BoxList((Box((4, 1), (2, 1)), Box((0, 0), (0, 3))))) == Box((4, 1), (2, 1))
    assert normal((6, 3), BoxList((Box((0, 0), (0, 3)),))) == FlatRange(0, 0)
    assert normal((6, 3), ROWS) == ROWS


@pytest.mark.parametrize("pieces", [BoxList((Box((0, 0), (1, 3)), Box((5, 0), (2, 3)))), BoxList((Box((0,), (1,)),))])
def test_box_lists_outside_of_the_tensor_are_refused(pieces: BoxList) -> None:
    with pytest.raises(ValueError, match="is not part of a tensor of shape"):
        normal((6, 3), pieces)


def test_a_tensor_that_does_not_fit_its_box_list_is_refused() -> None:
    with pytest.raises(ValueError, match="is not BoxList"):
        TensorShard(torch.zeros(9), (6, 3), ROWS)
