"""Table of runs: which recipe keys differ, which metrics the runs have, and which run is best. Needs no torch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddpforge.api import Comparison, RunSummary, sorted_by
from ddpforge.errors import UsageError
from ddpforge.runs.summary import notable

__all__ = ["RunTable", "table"]

_MOST_KEYS = 8  # columns
_NO_RESULT = re.compile(r"train/time/.*|perf/.*|samples|epoch|lr(/.*)?")  # metrics that do not rank runs


@dataclass(frozen=True, kw_only=True)
class RunTable:
    """Columns of the table, with one value per run, and the order of its rows."""

    keys: Mapping[str, Sequence[Any]]  # recipe keys that differ and affect training
    metrics: Mapping[str, Sequence[float | None]]  # newest values, and "(best)" ones of evaluation metrics
    shown: Sequence[str]  # metrics that are columns; the first one sorts the rows
    order: Sequence[int]  # the runs' numbers, best first


def table(runs: Sequence[RunSummary], comparison: Comparison | None) -> RunTable:
    """Returns the table of `runs`, without keys if there is no comparison."""
    shown = notable(runs)
    return RunTable(
        keys=dict(list(_keys(comparison).items())[:_MOST_KEYS]) if comparison else {},
        metrics=_metrics(runs, comparison),
        shown=shown,
        order=_order(runs, shown),
    )


def _keys(comparison: Comparison) -> dict[str, Sequence[Any]]:
    from ddpforge.recipe.schema import Resume, resume_policy

    return {key: each for key, each in comparison.recipe.items() if resume_policy(key) is not Resume.NOT_TRAINING}


def _metrics(runs: Sequence[RunSummary], comparison: Comparison | None) -> dict[str, Sequence[float | None]]:
    """Returns values from the runs' status; values that are not in a status come from the rows."""
    rows = comparison.metrics if comparison else {}
    names = dict.fromkeys([*(name for run in runs for name in run.metrics), *rows])
    nothing = [None] * len(runs)
    return {
        name: [run.metrics.get(name, value) for run, value in zip(runs, rows.get(name, nothing), strict=True)]
        for name in names
        if not _NO_RESULT.fullmatch(name)
    }


def _order(runs: Sequence[RunSummary], shown: Sequence[str]) -> list[int]:
    try:
        best = sorted_by(runs, shown[0]) if shown else list(runs)
    except UsageError:  # the metric has no finite value, or no known direction
        best = list(runs)
    numbers = {id(run): number for number, run in enumerate(runs)}
    return [numbers[id(run)] for run in best]
