"""Reduction of metrics over ranks: by name, with different names per rank, in one all-reduce."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ddpforge.errors import PluginError
from ddpforge.interfaces import Metric, Ranks, SampleColumns, Total
from ddpforge.interfaces import device as kinds
from ddpforge.ranks.collectives import SingleRank
from ddpforge.testing.doubles import ThreadRanks, in_threads
from ddpforge.training.totals import exact

Row = Mapping[str, tuple[float, float]]


def means(*ranks: Sequence[Row]) -> tuple[list[list[dict[str, float]]], int]:
    """Returns the means of each row on each rank, and the number of all-reduces."""

    def run(one: Ranks) -> tuple[list[dict[str, float]], int]:
        found = [
            one.reduce_metrics(
                {name: Total(torch.tensor(sum_), torch.tensor(count)) for name, (sum_, count) in row.items()}
            )
            for row in ranks[one.rank]
        ]
        return found, cast(ThreadRanks, one).sums

    results = in_threads(len(ranks), run)
    return [found for found, _ in results], results[0][1]


def test_metrics_are_reduced_by_name_in_any_order() -> None:
    (one, other), _ = means([{"even": (2.0, 2), "odd": (4.0, 2)}], [{"odd": (2.0, 1), "even": (1.0, 1)}])
    assert one == other == [{"even": 1.0, "odd": 2.0}]


def test_means_have_the_order_of_this_ranks_names() -> None:
    """Keeps the loss first in a row, whatever the names of metrics."""
    (one, other), _ = means([{"loss": (2.0, 2), "accuracy": (4.0, 2)}], [{"b": (2.0, 1), "loss": (1.0, 1)}])
    assert [list(found[0]) for found in (one, other)] == [["loss", "accuracy", "b"], ["b", "loss", "accuracy"]]


def test_ranks_may_have_different_names() -> None:
    """Rank 0 has the even samples of 0 to 3, rank 1 the odd samples."""
    (one, other), _ = means([{"even": (2.0, 2)}], [{"odd": (4.0, 2)}])
    assert one == other == [{"even": 1.0, "odd": 2.0}]


def test_missing_names_are_absent_and_names_without_count_are_nan() -> None:
    (one, _), _ = means([{"a": (1.0, 1), "b": (3.0, 1)}, {"b": (0.0, 0)}], [{"a": (3.0, 1)}, {"b": (0.0, 0)}])
    assert one[0] == {"a": 2.0, "b": 3.0}
    assert list(one[1]) == ["b"]
    assert math.isnan(one[1]["b"])


def test_plain_numbers_are_averaged_over_the_ranks_that_have_them() -> None:
    numbers: list[dict[str, float]] = [{"all": 1.0, "some": 5}, {"all": 2.0}, {"all": 6.0, "some": 7}]
    found = in_threads(3, lambda one: one.reduce_metrics(numbers[one.rank]))
    assert found == [{"all": 3.0, "some": 6.0}] * 3


def test_all_reduce_mean_averages_plain_numbers() -> None:
    found = in_threads(3, lambda one: one.all_reduce_mean({"mine": float(one.rank), "all": 2}))
    assert found == [{"all": 2.0, "mine": 1.0}] * 3
    assert SingleRank().all_reduce_mean({"mine": 4}) == {"mine": 4}


def test_known_names_need_one_all_reduce() -> None:
    """New names need one more all-reduce; then each row needs one, also with fewer names."""
    rows = [{"é": (1.0, 1), "b": (1.0, 1)}] * 4
    _, first = means(rows[:1], rows[:1])
    _, later = means([*rows, {}], [*rows, {"b": (1.0, 1)}])
    assert first == 2
    assert later == first + 4


def test_nan_of_one_metric_does_not_change_other_metrics() -> None:
    (one, _), _ = means([{"a": (math.nan, 1), "b": (1.0, 1)}], [{"a": (1.0, 1), "b": (3.0, 1)}])
    assert math.isnan(one[0]["a"])
    assert one[0]["b"] == 2.0


@pytest.mark.parametrize("ranks", [1, 3])
def test_sums_and_counts_are_added_over_ranks_before_the_division(ranks: int) -> None:
    found, _ = means(*([{"x": (float(rank), rank + 1.0)}] for rank in range(ranks)))
    expected = sum(range(ranks)) / sum(range(1, ranks + 1))
    assert all(rows == [{"x": expected}] for rows in found)


# ---------------------------------------------------------------------------------------------- any shape
class Shares(Metric):
    """Share of each element in the sum, by the element's index."""

    name = "shares"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        return Total(outputs, 1)

    def finish(self, sum: Tensor, count: Tensor) -> Mapping[str, float]:
        assert sum.dtype == count.dtype == torch.float64
        return {str(i): float(x) for i, x in enumerate(sum / sum.sum())}


class Middle(Metric):
    """Median of all samples, and the number of samples with target 1."""

    name = "middle"

    def __call__(self, outputs: Tensor, targets: Tensor) -> SampleColumns:
        return SampleColumns(outputs, targets)

    def finish(self, values: Tensor, kinds: Tensor) -> Mapping[str, float]:
        assert (values.dtype, kinds.dtype) == (torch.float64, torch.int64)
        return {"value": float(values.median()), "ones": float(kinds.sum())}


def together(
    metric: Metric, *ranks: Sequence[Mapping[str, Total | SampleColumns]]
) -> tuple[list[list[dict[str, float]]], int]:
    """Returns the finished metrics of each row on each rank, and the number of all-reduces."""

    def run(one: Ranks) -> tuple[list[dict[str, float]], int]:
        return [one.reduce_metrics(row, {metric.name: metric}) for row in ranks[one.rank]], cast(ThreadRanks, one).sums

    results = in_threads(len(ranks), run)
    return [found for found, _ in results], results[0][1]


def test_totals_of_any_shape_share_one_all_reduce() -> None:
    row: dict[str, Total | SampleColumns] = {
        "shares": Total(torch.tensor([1.0, 2.0]), 1),
        "x": Total(torch.tensor(3.0), torch.tensor(2)),
    }
    other: dict[str, Total | SampleColumns] = {
        "x": Total(torch.tensor(1.0), 2),
        "shares": Total(torch.tensor([0.0, 1.0]), 1),
    }
    (one, two), first = together(Shares(), [row], [other])
    assert one == two == [{"shares/0": 0.25, "shares/1": 0.75, "x": 1.0}]
    _, later = together(Shares(), [row] * 4, [other] * 4)
    assert later == first + 3


def test_rank_without_samples_gets_the_finished_metric() -> None:
    (one, two), _ = together(Shares(), [{}, {}], [{"shares": Total(torch.tensor([1.0, 3.0]), 1)}] * 2)
    assert one == two == [{"shares/0": 0.25, "shares/1": 0.75}] * 2


def test_counts_may_have_the_shape_of_the_sum() -> None:
    class Recall(Shares):
        def finish(self, sum: Tensor, count: Tensor) -> float:  # type: ignore[override]
            return float((sum / count).mean())

    rows: list[dict[str, Total | SampleColumns]] = [
        {"shares": Total(torch.tensor([1, 0]), torch.tensor([1, 1]))},
        {"shares": Total(torch.tensor([0, 0]), torch.tensor([3, 0]))},
    ]
    (one, two), _ = together(Recall(), *[[row] for row in rows])
    assert one == two == [{"shares": (1 / 4 + 0 / 1) / 2}]


def test_finish_receives_the_sample_columns_of_all_ranks() -> None:
    """Values 1 to 5: one on rank 0, none on rank 1, four on rank 2."""
    few: dict[str, Total | SampleColumns] = {"middle": SampleColumns(torch.tensor([5.0]), torch.tensor([True]))}
    batches = [
        SampleColumns(torch.tensor(x), torch.tensor(y))
        for x, y in (([1.0, 2.0], [True, False]), ([3.0, 4.0], [True] * 2))
    ]
    many: dict[str, Total | SampleColumns] = {"middle": batches[0] + batches[1]}
    found, _ = together(Middle(), [few], [{}], [many])
    assert found == [[{"middle/value": 3.0, "middle/ones": 4.0}]] * 3


def test_metric_without_count_is_nan_and_finish_is_not_called() -> None:
    nothing: dict[str, Total | SampleColumns] = {"shares": Total(torch.zeros(2), 0)}
    (one, _), _ = together(Shares(), [nothing], [nothing])
    assert math.isnan(one[0]["shares"])
    (one, _), _ = together(
        Middle(), [{"middle": SampleColumns(torch.zeros(0), torch.zeros(0, dtype=torch.int64))}], [{}]
    )
    assert math.isnan(one[0]["middle"])


def test_two_shapes_of_one_name_are_rejected_on_every_rank() -> None:
    def run(one: Ranks) -> str:
        with pytest.raises(PluginError, match=r"ranks have `shares` in two forms.*: \[2\] and \[\], and \[3\] and"):
            one.reduce_metrics({"shares": Total(torch.zeros(2 + one.rank), 1)}, {"shares": Shares()})
        return "refused"

    assert in_threads(2, run) == ["refused"] * 2


def test_shape_of_a_metric_may_change_between_rows() -> None:
    rows: list[dict[str, Total | SampleColumns]] = [{"shares": Total(torch.ones(n), 1)} for n in (2, 4)]
    (one, two), _ = together(Shares(), rows, rows)
    assert one == two == [{f"shares/{i}": 1 / n for i in range(n)} for n in (2, 4)]


def test_total_with_a_shape_but_without_a_metric_is_rejected() -> None:
    with pytest.raises(PluginError, match=r"`other` is not a single number: it has the shape \[2\], \[\]"):
        together(Shares(), [{"other": Total(torch.zeros(2), 1)}])


@pytest.mark.parametrize("made", [None, "much", {"a": [1, 2]}, torch.ones(2)])
def test_finish_must_return_numbers(made: Any) -> None:
    class Odd(Shares):
        def finish(self, sum: Tensor, count: Tensor) -> Any:
            return made

    with pytest.raises(PluginError, match=r"Odd\.finish returns .* for `shares`; expected a number, or"):
        together(Odd(), [{"shares": Total(torch.ones(2), 1)}])


# ---------------------------------------------------------------------------------------------- without float64
@pytest.fixture
def no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the CPU a device without float64."""

    class Short(kinds.CPU):
        has_float64 = False

    monkeypatch.setitem(kinds._KINDS, "cpu", Short())


@pytest.mark.usefixtures("no_float64")
def test_totals_of_a_device_without_float64_are_added_in_float64_on_the_host() -> None:
    whole: Any = exact(Total(torch.tensor(0.1), torch.tensor(3)))
    assert (whole.sum.dtype, whole.count.dtype) == (torch.float64, torch.float64)
    for _ in range(999):
        whole = whole + exact(Total(torch.tensor(0.1), torch.tensor(3)))
    many = exact(Total(torch.full((2, 3), 0.1), 7))
    found = SingleRank().reduce_metrics({"loss": whole, "many": many, "plain": 2.5}, {"many": Parts()})
    tenth = torch.tensor(0.1).double().item()
    assert found["loss"] == pytest.approx(tenth / 3, rel=1e-13)
    assert found["many/sum"] == pytest.approx(6 * tenth, rel=1e-13)
    assert (found["many/count"], found["plain"]) == (7.0, 2.5)


@pytest.mark.usefixtures("no_float64")
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_total_that_is_not_finite_stays_so_without_float64(value: float) -> None:
    total: Any = exact(Total(torch.tensor(1.0), 1))
    total += exact(Total(torch.tensor(value), 1))
    mean = SingleRank().reduce_metrics({"loss": total})["loss"]
    assert mean == value or (math.isnan(mean) and math.isnan(value))


class Parts(Metric):
    """Returns the sum of its sum, and its count."""

    name = "many"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        raise NotImplementedError

    def finish(self, sum: Tensor, count: Tensor) -> dict[str, float]:
        assert sum.dtype == torch.float64
        return {"sum": float(sum.sum()), "count": float(count)}
