"""Renders a report as one HTML page that fetches nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from ddpforge.api import RunSummary
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.tools.reports.charts import Chart, Curve
from ddpforge.tools.reports.report import ReportedMedia, ReportedRun, RunReport

__all__ = ["render"]

_MANY = 8  # a page of more runs repeats nothing that they have in common
_LISTED = 5  # names of runs in a list
_ASSETS = files("ddpforge.tools.reports") / "assets"


def render(report: RunReport, *, live: float | None = None) -> str:
    """Returns the page's HTML; with `live` the page reloads itself from its server every `live` seconds."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    filters = {
        **{"count": lambda number: f"{number:,}", "grouped": _grouped, "histogram": _described, "moment": _moment},
        **{"number": _number, "size": _size, "steps": _steps, "thinned": _thinned, "value": _value},
    }
    environment = Environment(autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    environment.filters.update(filters)
    assets = {
        "chart_style": "uPlot.min.css",
        "chart_script": "uPlot.iife.min.js",
        "style": "report.css",
        "script": "report.js",
    }
    return environment.from_string(_read("report.html")).render(
        report=report,
        many=len(report.runs) > _MANY,
        assets=SimpleNamespace(**{name: Markup(_read(file)) for name, file in assets.items()}),
        data=Markup(_data(report)),
        live=live,
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _data(report: RunReport) -> str:
    """Returns the points to draw as JSON, escaped so that no text in it can close the script element."""
    grids: list[dict[tuple[int, ...], int]] = [{} for _ in report.runs]  # curves of a run often have the same steps
    charts = [
        {
            "title": chart.title,
            "metrics": chart.metrics,
            "curves": [_drawn(curve, chart, grids[curve.run]) for curve in chart.curves],
        }
        for chart in report.charts
    ]
    metrics = {
        name: {"lower": lower_is_better(name), "values": _finite(values)}
        for name, values in report.table.metrics.items()
    }
    content = {
        "runs": [_drawn_of_run(number, run, list(grids[number]), report) for number, run in enumerate(report.runs)],
        "charts": charts,
        "keys": {key: _finite(values) for key, values in report.table.keys.items()},
        "metrics": metrics,
        "shown": report.table.shown,
    }
    return json.dumps(content, separators=(",", ":"), default=str).replace("<", "\\u003c")


def _drawn(curve: Curve, chart: Chart, grids: dict[tuple[int, ...], int]) -> dict[str, Any]:
    return {
        "run": curve.run,
        "metric": chart.metrics.index(curve.metric),
        "grid": grids.setdefault(tuple(curve.steps), len(grids)),
        "values": curve.values,
        "count": curve.count,
        **({"odd": curve.odd} if curve.odd else {}),
    }


def _drawn_of_run(number: int, run: ReportedRun, grids: Sequence[Sequence[int]], report: RunReport) -> dict[str, Any]:
    starts = [attempt.step for attempt in run.attempts[1:]]
    odd = [curve.odd for chart in report.charts for curve in chart.curves if curve.run == number]
    drawn = {*starts, *run.skipped, *(step for steps in [*grids, *odd] for step in steps)}
    return {
        "name": run.name,
        "state": run.standing.state,
        "grids": grids,
        "hours": {step: run.hours[step] for step in sorted(drawn)},
        "starts": starts,
        "skipped": run.skipped,
    }


def _finite(values: Sequence[Any]) -> list[Any]:
    """Replaces values that JSON does not have."""
    return [None if isinstance(value, float) and not math.isfinite(value) else value for value in values]


# ---------------------------------------------------------------------------------------------- texts
def _thinned(chart: Chart) -> str:
    """Returns a sentence if not every value is a point, else an empty text."""
    here, there = sum(len(curve.values) for curve in chart.curves), sum(curve.count for curve in chart.curves)
    return "" if here == there else f"{here:,} of {there:,} values: the lowest and highest of every interval"


def _described(shown: ReportedMedia) -> str:
    counts, edges = shown.value["counts"], shown.value["edges"]
    odd = f", {shown.value['nonfinite']:,} not finite" if shown.value.get("nonfinite") else ""
    return f"{shown.name}: {sum(counts):,} values from {edges[0]:.4g} to {edges[-1]:.4g}{odd}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _grouped(values: Sequence[Any], report: RunReport) -> list[tuple[str, str]]:
    """Returns the different values of a key, each with its runs."""
    runs: dict[str, list[str]] = {}
    for run, value in zip(report.runs, values, strict=True):
        runs.setdefault(_value(value), []).append(run.name)
    return [(value, _listed(names)) for value, names in runs.items()]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def _steps(run: RunSummary) -> str:
    return f"{run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.12g}".replace("e-0", "e-").replace("e+0", "e+")
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
