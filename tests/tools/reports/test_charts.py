"""Charts of runs: metrics grouped into charts, and long curves reduced to fewer points."""

import math

import pytest

from ddpforge.tools.reports.charts import charts, skipped


def rows(count: int, **metrics: float) -> list[dict[str, float]]:
    return [{"step": step, "attempt": 1, "time": 100.0 + 36 * step, **metrics} for step in range(1, count + 1)]


def test_related_metrics_share_a_chart() -> None:
    metrics = [
        "samples",
        "train/grad_norm",
        "train/accuracy",
        "lr",
        "lr/head",
        "train/loss",
        "eval/loss",
        "eval/x/loss",
    ]
    metrics += ["eval/accuracy", "train/samples_per_second", "perf/peak_memory_gib", "mine"]
    metrics += ["train/time/data", "train/time/optimizer", "train/tokens_per_second"]
    found = charts([rows(2, **dict.fromkeys(metrics, 1.0)), rows(1, **{"train/loss": 2.0})])
    assert {chart.title: [curve.metric for curve in chart.curves] for chart in found} == {
        "loss": ["train/loss", "eval/loss", "eval/x/loss", "train/loss"],
        "accuracy": ["train/accuracy", "eval/accuracy"],
        "learning rate": ["lr", "lr/head"],
        "gradient norm": ["train/grad_norm"],
        "samples per second": ["train/samples_per_second"],
        "peak memory gib": ["perf/peak_memory_gib"],
        "share of time": ["train/time/data", "train/time/optimizer"],
        "tokens per second": ["train/tokens_per_second"],
        "mine": ["mine"],
    }
    assert [chart.title for chart in found][:2] == ["loss", "accuracy"]
    assert [curve.run for curve in found[0].curves] == [0, 0, 0, 1]


def test_points_have_steps() -> None:
    ((chart,),) = [charts([rows(3, lr=0.5)])]
    (curve,) = chart.curves
    assert (curve.steps, curve.values) == ([1, 2, 3], [0.5, 0.5, 0.5])
    assert chart.metrics == ["lr"]


def test_reduced_curve_keeps_its_extremes_and_its_count() -> None:
    found = rows(100_000, lr=0.5)
    found[77_776]["lr"] = 9.0
    ((curve,),) = [chart.curves for chart in charts([found])]
    assert len(curve.values) <= 2000
    assert curve.count == 100_000
    assert curve.highest == (77_777, 9.0)
    assert curve.lowest == (1, 0.5)


def test_many_curves_share_the_limit_of_points_per_page() -> None:
    found = charts([rows(1000, **{f"m{number}": 1.0 for number in range(400)})])
    assert sum(len(chart.curves[0].values) for chart in found) <= 40_000


def test_nonfinite_values_are_listed_apart_from_points() -> None:
    found = rows(4, lr=0.5)
    found[1]["lr"] = math.nan
    ((curve,),) = [chart.curves for chart in charts([found])]
    assert (curve.steps, curve.count, curve.odd) == ([1, 3, 4], 3, [2])


@pytest.mark.parametrize(("counts", "steps"), [([], []), ([1, 1, 3, 3], [2, 4]), ([0, 0, 0, 0], [])])
def test_skipped_steps_are_found_by_the_growth_of_their_count(counts: list[float], steps: list[int]) -> None:
    found = rows(5)
    for row, count in zip(found[1:], counts, strict=False):
        row["train/skipped_steps"] = count
    assert list(skipped(found)) == steps
