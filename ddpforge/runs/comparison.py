"""Compares runs by their folders: recipes, code, environments, metrics and their curves. Needs no torch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, TypeVar

from ddpforge.errors import UsageError
from ddpforge.interfaces.direction import lower_is_better
from ddpforge.runs.changes import flattened
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import Row, read_metrics

__all__ = ["Comparison", "Point", "compare", "curves", "thinned"]

_PLACE = ("name", "output_dir")  # of a recipe: where the run is, which is known
_MOMENT = ("time", "command")  # of an environment: never alike

Point = tuple[int, float]
P = TypeVar("P", bound=tuple[float, float])
"""A step and what a metric was there."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The differences between runs: by key, the value in each of them, None where one lacks it.

    `metrics` are all that any of them has: the last value, and of a metric that evaluations give and whose name tells
    what is better, also the best, as "eval/loss (best)".
    """

    runs: Sequence[str]
    recipe: Mapping[str, Sequence[Any]]
    code: Mapping[str, Sequence[Any]]
    environment: Mapping[str, Sequence[Any]]
    metrics: Mapping[str, Sequence[float | None]]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def compare(folders: Sequence[RunFolder]) -> Comparison:
    """Compares runs with one another."""
    recipes = [flattened(folder.tables()) for folder in folders]
    measured = [_summary(_rows(folder)) for folder in folders]
    return Comparison(
        runs=[str(folder.path) for folder in folders],
        recipe=_unlike([{key: value for key, value in one.items() if key not in _PLACE} for one in recipes]),
        code=_unlike([_code(folder) for folder in folders]),
        environment=_unlike([_environment(folder) for folder in folders]),
        metrics={name: [one.get(name) for one in measured] for name in _keys(measured)},
    )


def _keys(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def _unlike(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found = {key: [table.get(key) for table in tables] for key in _keys(tables)}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _code(folder: RunFolder) -> dict[str, str]:
    """The hashes of the run's copies of local files, as far as people compare them."""
    copies = sorted((folder.path / "code").rglob("*.py"))
    return {path.relative_to(folder.path).as_posix(): sha256(folder.code(path)).hexdigest()[:12] for path in copies}


def _environment(folder: RunFolder) -> dict[str, Any]:
    return {key: value for key, value in flattened(folder.surroundings()).items() if key not in _MOMENT}


# ---------------------------------------------------------------------------------------------- metrics
def _rows(folder: RunFolder) -> list[Row]:
    return read_metrics(folder.path) if os.path.lexists(folder.metrics) else []


def _summary(rows: Sequence[Row]) -> dict[str, float | None]:
    names = [name for name in _keys(rows) if name not in ("step", "attempt", "time")]
    found: dict[str, float | None] = {}
    for name in names:
        values = [row[name] for row in rows if name in row]
        found[name] = values[-1] if math.isfinite(values[-1]) else None
        finite = [value for value in values if math.isfinite(value)]
        lower = lower_is_better(name)
        if name.startswith("eval/") and lower is not None and finite:
            found[f"{name} (best)"] = min(finite) if lower else max(finite)
    return found


def curves(folders: Sequence[RunFolder], metrics: Sequence[str]) -> dict[str, dict[str, list[Point]]]:
    """The finite values of each metric by run; raises UsageError for a metric that none of the runs has."""
    rows = {str(folder.path): _rows(folder) for folder in folders}
    found: dict[str, dict[str, list[Point]]] = {}
    for metric in metrics:
        lines = {
            run: [(row["step"], row[metric]) for row in mine if math.isfinite(row.get(metric, math.nan))]
            for run, mine in rows.items()
        }
        found[metric] = {run: points for run, points in lines.items() if points}
        if not found[metric]:
            known = sorted(_keys(row for mine in rows.values() for row in mine))
            raise UsageError(f"no run has a metric {metric}", hints=[f"metrics there: {', '.join(known) or 'none'}"])
    return found


def thinned(points: Sequence[P], most: int) -> list[P]:
    """At most `most` of the points, among them the lowest and the highest of each stretch: no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[P] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept
