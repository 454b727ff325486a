"""Renders a report as one HTML page that fetches nothing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from types import SimpleNamespace
from typing import Any

from ddpforge.runs.summary import RunSummary, notable
from ddpforge.tools.reports.charts import Chart, Curve
from ddpforge.tools.reports.report import ReportedMedia, ReportedRun, RunReport

__all__ = ["render"]

_ASSETS = files("ddpforge.tools.reports") / "assets"


def render(report: RunReport, *, live: float | None = None) -> str:
    """Returns the page's HTML; with `live` the page reloads itself from its server every `live` seconds."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    filters = {
        **{"count": lambda number: f"{number:,}", "histogram": _told, "label": _label},
        **{"moment": _moment, "number": _number, "size": _size, "steps": _steps, "thinned": _thinned, "value": _value},
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
        title=", ".join(run.name for run in report.runs[:3]) + (", …" if len(report.runs) > 3 else ""),
        metrics=notable([run.standing for run in report.runs]),
        assets=SimpleNamespace(**{name: Markup(_read(file)) for name, file in assets.items()}),
        data=Markup(_data(report)),
        live=live,
    )


def _read(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _data(report: RunReport) -> str:
    """Returns the points to draw as JSON, escaped so that no text in it can close the script element."""
    runs = [_drawn_of_run(run) for run in report.runs]
    drawn = [{"curves": [_drawn(curve, report) for curve in chart.curves]} for chart in report.charts]
    return json.dumps({"runs": runs, "charts": drawn}, separators=(",", ":")).replace("<", "\\u003c")


def _drawn(curve: Curve, report: RunReport) -> dict[str, Any]:
    return {
        "run": curve.run,
        "metric": curve.metric,
        "label": _label(curve, report),
        "training": curve.metric.startswith("train/"),
        "steps": curve.steps,
        "hours": curve.hours,
        "values": curve.values,
        "odd": _places(report.runs[curve.run], curve.odd),
    }


def _drawn_of_run(run: ReportedRun) -> dict[str, Any]:
    starts = [attempt.step for attempt in run.attempts[1:]]
    return {"name": run.name, "starts": _places(run, starts), "skipped": _places(run, run.skipped)}


def _places(run: ReportedRun, steps: Sequence[int]) -> dict[str, list[float]]:
    """Returns the positions of steps with a row, on both horizontal axes."""
    return {"steps": list(steps), "hours": [run.hours[step] for step in steps]}


# ---------------------------------------------------------------------------------------------- texts
def _label(curve: Curve, report: RunReport) -> str:
    return curve.metric if len(report.runs) == 1 else f"{report.runs[curve.run].name} {curve.metric}"


def _thinned(chart: Chart) -> str:
    """Returns a sentence if not every value is a point, else an empty text."""
    here, there = sum(len(curve.values) for curve in chart.curves), sum(curve.count for curve in chart.curves)
    return "" if here == there else f"{here:,} of {there:,} values: the lowest and highest of every interval"


def _told(shown: ReportedMedia) -> str:
    counts, edges = shown.value["counts"], shown.value["edges"]
    odd = f", {shown.value['nonfinite']:,} not finite" if shown.value.get("nonfinite") else ""
    return f"{shown.name}: {sum(counts):,} values from {edges[0]:.4g} to {edges[-1]:.4g}{odd}"


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5g}"


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def _steps(run: RunSummary) -> str:
    return f"{run.step:,}" + (f" of {run.total_steps:,}" if run.total_steps else "")


def _value(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
