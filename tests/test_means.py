"""Means over ranks: by name, whatever each rank names, in one reduction."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from ddpforge.interfaces import Total, World
from ddpforge.means import Means

Row = Mapping[str, tuple[float, float]]


class Together:
    """Ranks as threads of this process: each calls `total`, which gives all of them the sum."""

    def __init__(self, ranks: int) -> None:
        self.reductions = 0
        self._barrier = Barrier(ranks, timeout=300)
        self._given: dict[int, Tensor] = {}

    def total(self, rank: int) -> Callable[[Tensor], Tensor]:
        def total(values: Tensor) -> Tensor:
            self._given[rank] = values
            self._barrier.wait()
            summed = torch.stack([self._given[key] for key in sorted(self._given)]).sum(0)
            self.reductions += rank == 0
            self._barrier.wait()
            return summed

        return total


def world(rank: int, ranks: int) -> World:
    device = torch.device("cpu")
    return World(rank=rank, size=ranks, local_rank=rank, device=device, data_rank=rank, data_size=ranks)


def means(*ranks: Sequence[Row]) -> tuple[list[list[dict[str, float]]], int]:
    """What each rank learns from each of its rows, and how many reductions that took."""
    together = Together(len(ranks))

    def run(rank: int) -> list[dict[str, float]]:
        mean = Means(world(rank, len(ranks)), together.total(rank))
        return [
            mean({name: Total(torch.tensor(sum_), torch.tensor(count)) for name, (sum_, count) in row.items()})
            for row in ranks[rank]
        ]

    with ThreadPoolExecutor(len(ranks)) as pool:
        found = list(pool.map(run, range(len(ranks))))
    return found, together.reductions


def test_names_in_another_order_are_not_mixed_up() -> None:
    (one, other), _ = means([{"even": (2.0, 2), "odd": (4.0, 2)}], [{"odd": (2.0, 1), "even": (1.0, 1)}])
    assert one == other == [{"even": 1.0, "odd": 2.0}]


def test_each_rank_may_have_names_of_its_own() -> None:
    """Ids 0 to 3: rank 0 has the even ones, rank 1 the odd ones."""
    (one, other), _ = means([{"even": (2.0, 2)}], [{"odd": (4.0, 2)}])
    assert one == other == [{"even": 1.0, "odd": 2.0}]


def test_what_nobody_named_this_time_is_not_there_and_what_nobody_counted_is_nan() -> None:
    (one, _), _ = means([{"a": (1.0, 1), "b": (3.0, 1)}, {"b": (0.0, 0)}], [{"a": (3.0, 1)}, {"b": (0.0, 0)}])
    assert one[0] == {"a": 2.0, "b": 3.0}
    assert list(one[1]) == ["b"]
    assert math.isnan(one[1]["b"])


def test_known_names_cost_one_reduction() -> None:
    """Two to learn the names, one to reduce again; then one a row, also with fewer names."""
    rows = [{"é": (1.0, 1), "b": (1.0, 1)}] * 4
    _, first = means(rows[:1], rows[:1])
    _, later = means([*rows, {}], [*rows, {"b": (1.0, 1)}])
    assert first == 4
    assert later == first + 4


def test_a_nan_of_one_metric_leaves_the_others_alone() -> None:
    (one, _), _ = means([{"a": (math.nan, 1), "b": (1.0, 1)}], [{"a": (1.0, 1), "b": (3.0, 1)}])
    assert math.isnan(one[0]["a"])
    assert one[0]["b"] == 2.0


@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_and_counts_are_added_up_before_they_are_divided(ranks: int) -> None:
    found, _ = means(*([{"x": (float(rank), rank + 1.0)}] for rank in range(ranks)))
    expected = sum(range(ranks)) / sum(range(1, ranks + 1))
    assert all(rows == [{"x": expected}] for rows in found)
