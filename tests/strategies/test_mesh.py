"""Process groups and meshes of every rank for parallel dimensions, checked by hand."""

import pytest
from support.forked import in_ranks, train

from ddpforge.ranks.join import join
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.fsdp.mesh import ParallelDims


def placed(grid: ParallelDims, ranks: int) -> list[dict[str, list[int]]]:
    """Returns the ranks of each group, for each rank."""

    def rank(number: int) -> dict[str, list[int]]:
        places = grid.places(join(train(), FSDP()))
        groups = {name: getattr(places, name).all_gather_object(number) for name in ("data", "context", "tensor")}
        return groups | {"mesh": places.mesh.mesh.tolist()}

    return in_ranks(ranks, rank)


def test_tensor_groups_are_neighbours_and_data_groups_are_strided() -> None:
    found = placed(ParallelDims(tensor=2), 4)
    assert [each["tensor"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["data"] for each in found] == [each["mesh"] for each in found] == [[0, 2], [1, 3]] * 2
    assert [each["context"] for each in found] == [[0], [1], [2], [3]]


def test_replicas_are_the_outermost_dimension() -> None:
    found = placed(ParallelDims(replicas=2, tensor=2), 4)
    assert [each["mesh"] for each in found] == [[[0], [2]], [[1], [3]]] * 2
    assert [each["data"] for each in found] == [[0, 2], [1, 3]] * 2


def test_weights_are_sharded_over_context_ranks() -> None:
    found = placed(ParallelDims(context=2), 4)
    assert [each["context"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["data"] for each in found] == [[0, 2], [1, 3]] * 2
    assert [each["mesh"] for each in found] == [[0, 1, 2, 3]] * 4


def test_context_is_between_data_and_tensor() -> None:
    found = placed(ParallelDims(context=2, tensor=2), 4)
    assert [each["tensor"] for each in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [each["context"] for each in found] == [each["mesh"] for each in found] == [[0, 2], [1, 3]] * 2
    assert [each["data"] for each in found] == [[0], [1], [2], [3]]


def test_without_dimensions_all_ranks_are_one_mesh_with_different_data() -> None:
    assert placed(ParallelDims(), 2) == [
        {"data": [0, 1], "context": [number], "tensor": [number], "mesh": [0, 1]} for number in range(2)
    ]


@pytest.mark.parametrize(
    ("grid", "ranks", "key", "said"),
    [
        (ParallelDims(tensor=3), 4, "strategy.tensor", "= 3 does not divide the 4 ranks | use one of 1, 2, 4"),
        (ParallelDims(tensor=2), 1, "strategy.tensor", "= 2 does not divide the 1 rank | remove it"),
        (
            ParallelDims(replicas=3, tensor=2),
            8,
            "strategy.replicas",
            "= 3 does not divide the 4 groups of 2 ranks that see the same samples | use one of 1, 2, 4",
        ),
        (
            ParallelDims(context=2, tensor=2),
            2,
            "strategy.context",
            "= 2 does not divide the 1 group of 2 ranks that see the same samples | remove it",
        ),
    ],
    ids=str,
)
def test_sizes_that_do_not_divide_are_refused_with_valid_sizes(
    grid: ParallelDims, ranks: int, key: str, said: str
) -> None:
    (refusal,) = grid.unsupported(ranks)
    assert (refusal.key, " | ".join([refusal.message, *refusal.hints])) == (key, f"{key} {said}")


@pytest.mark.parametrize(
    ("grid", "data"), [(ParallelDims(), 8), (ParallelDims(replicas=2), 8), (ParallelDims(context=2, tensor=2), 2)]
)
def test_ranks_with_the_same_samples_count_once(grid: ParallelDims, data: int) -> None:
    assert grid.data_ranks(8) == data
    assert not list(grid.unsupported(8))


def test_sizes_that_do_not_divide_fewer_ranks_are_dropped() -> None:
    assert ParallelDims(tensor=2, replicas=2).fitting(2) == ParallelDims(tensor=2)
    assert ParallelDims(tensor=2, replicas=2).fitting(4) == ParallelDims(tensor=2, replicas=2)
    assert ParallelDims(tensor=2, context=3, replicas=2).fitting(4) == ParallelDims(tensor=2, replicas=2)


@pytest.mark.parametrize(("ranks", "groups"), [(1, 1), (2, 1), (4, 1), (8, 2), (12, 3)])
def test_ranks_that_share_samples_are_one_group_of_data_even_if_they_are_too_few(ranks: int, groups: int) -> None:
    """Batches of a recipe are also planned for fewer ranks than it needs."""
    assert ParallelDims(tensor=2, context=2).data_ranks(ranks) == groups
