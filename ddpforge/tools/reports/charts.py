"""Sorts the metrics of runs into charts, and thins out long curves. Needs no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ddpforge.api import Row, thinned

__all__ = ["Chart", "Curve", "charts", "skipped"]

_POINTS = 40_000  # points of all charts together, about 1 MB
_MOST, _FEWEST = 2000, 50  # points of one curve
_FACTS = ("step", "attempt", "time", "epoch", "samples")  # entries of a row that are not metrics
_LOSS, _QUALITY, _RATE, _GRADIENT, _SPEED, _OTHER = range(6)  # the order of charts


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Metric of one run; `count` is the number of its finite values. A long curve has fewer points."""

    run: int
    metric: str
    steps: list[int]
    values: list[float]
    count: int
    odd: list[int]  # steps with a value that is not finite

    @property
    def lowest(self) -> tuple[int, float]:
        """Returns the step of the lowest value, and the value."""
        return min(zip(self.steps, self.values, strict=True), key=lambda point: point[1])

    @property
    def highest(self) -> tuple[int, float]:
        """Returns the step of the highest value, and the value."""
        return max(zip(self.steps, self.values, strict=True), key=lambda point: point[1])


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Curves in one picture: a metric in training and in evaluations, of all runs."""

    title: str
    curves: list[Curve]

    @property
    def metrics(self) -> list[str]:
        """Returns the names of its metrics, each once."""
        return list(dict.fromkeys(curve.metric for curve in self.curves))


def charts(runs: Sequence[Sequence[Row]]) -> list[Chart]:
    """Returns the charts of runs with these rows: losses, metrics, learning rates, gradient norms, speed, the rest."""
    named = [(run, metric) for run, rows in enumerate(runs) for metric in _metrics(rows)]
    most = max(_FEWEST, min(_MOST, _POINTS // max(1, len(named))))
    found: dict[tuple[int, str], list[Curve]] = {}
    for run, metric in named:
        found.setdefault(_place(metric), []).append(_curve(run, metric, runs[run], most))
    order = sorted(found, key=lambda place: place[0])  # stable: otherwise in the order of the rows
    return [Chart(title=place[1], curves=found[place]) for place in order]


def _metrics(rows: Sequence[Row]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in rows for name in row) if name not in _FACTS]


def _place(metric: str) -> tuple[int, str]:
    """Returns the position and the title of the chart for a metric."""
    first, _, rest = metric.partition("/")
    if first == "lr":
        return _RATE, "learning rate"
    if rest.startswith("grad_norm"):
        return _GRADIENT, "gradient norm"
    if first == "train" and rest.startswith("time/"):
        return _SPEED, "share of time"
    if first == "perf" or rest == "skipped_steps" or rest.endswith("_per_second"):
        return _SPEED, (rest or first).replace("_", " ")
    if first in ("train", "eval") and rest:
        title = rest.rpartition("/")[2] if first == "eval" else rest.partition("/")[0]
        return _LOSS if title == "loss" else _QUALITY, title
    return _OTHER, metric


def _curve(run: int, metric: str, rows: Sequence[Row], most: int) -> Curve:
    having: list[Any] = [row for row in rows if metric in row]
    finite = {row["step"]: row for row in having if math.isfinite(row[metric])}
    points = thinned([(step, row[metric]) for step, row in finite.items()], most)
    return Curve(
        run=run,
        metric=metric,
        steps=[step for step, _ in points],
        values=[_rounded(value) for _, value in points],
        count=len(finite),
        odd=[row["step"] for row in having if not math.isfinite(row[metric])][:_MOST],
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def skipped(rows: Sequence[Row]) -> Iterator[int]:
    """Yields the steps of rows that count more skipped steps than the row before."""
    before = 0.0
    for row in rows:
        now = row.get("train/skipped_steps", before)
        if now > before:
            yield row["step"]
        before = now
