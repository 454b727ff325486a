"""Reads the state of runs from their folders, even while another process trains them. Needs no torch."""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from ddpforge.errors import SetupError, UsageError
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.runs.changes import flattened
from ddpforge.runs.folder import RunFolder, Status
from ddpforge.runs.metrics import Row, latest_rows, read_evaluations, read_metrics

__all__ = [
    "STATES",
    "Comparison",
    "Point",
    "RunSummary",
    "chosen",
    "compare",
    "curves",
    "differences",
    "find_runs",
    "leading",
    "named_runs",
    "notable",
    "rank_of_key",
    "sorted_by",
    "summarize",
    "thinned",
]

STATES = ("new", "starting", "running", "done", "preempted", "failed", "diverged", "killed", "unreadable")

_DEEPEST = 3  # levels of folders between a named folder and a run
_MOST_METRICS = 3  # columns of a list
_FACTS = ("step", "attempt", "time", "nonfinite")  # keys of a row that are not metrics

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """State of a run, seen from outside.

    `state` is that of `status.json`, or one of these: "new" before the first attempt; "starting" before the first step
    of an attempt; "killed" if the status is still "running" but no process holds the lock; "unreadable" if the
    folder is damaged, with the reason in `error`.
    """

    folder: RunFolder
    state: str
    step: int = 0
    total_steps: int | None = None
    attempt: int = 0
    metrics: Metrics = field(default_factory=dict)
    rate: float | None = None  # steps per second of this attempt, evaluations and checkpoints included
    changed: float = 0.0  # Unix time of the last change of its files
    recipe: Mapping[str, Any] = field(default_factory=dict)  # flat: dotted keys
    error: str | None = None

    @property
    def seconds_left(self) -> float | None:
        """Returns the seconds to the last step at the current rate; None if unknown, or if the run does not run."""
        if self.state != "running" or self.total_steps is None or not self.rate:
            return None
        return max(0, self.total_steps - self.step) / self.rate

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return {
            "run": str(self.folder.path),
            "state": self.state,
            "step": self.step,
            "total_steps": self.total_steps,
            "attempt": self.attempt,
            "metrics": dict(self.metrics),
            "steps_per_second": self.rate,
            "seconds_left": self.seconds_left,
            "changed": self.changed,
            "error": self.error,
        }


# ---------------------------------------------------------------------------------------------- finding
def find_runs(places: Sequence[str | Path]) -> list[RunFolder]:
    """Returns the runs in `places`. Each place is a run, or a folder with runs at most three levels below it.

    Raises UsageError for a place that does not exist.
    """
    found = []
    for place in map(Path, places):
        if not place.is_dir():
            raise UsageError(f"there is no folder {place}", hints=["name a run, or a folder that contains runs"])
        found += list(_runs_in(place, _DEEPEST))
    return [RunFolder(path) for path in dict.fromkeys(found)]


def named_runs(names: Sequence[str]) -> list[RunFolder]:
    """Returns the named runs. A name is a run's folder, its name in runs/, or a folder that contains runs.

    Raises UsageError for any other name.
    """
    found: list[RunFolder] = []
    for name in names:
        place = Path(name)
        inside = find_runs([place]) if place.is_dir() and not RunFolder(place).exists() else []
        found += inside or [RunFolder.find(name)]
    return list(dict.fromkeys(found))


def _runs_in(place: Path, levels: int) -> Iterator[Path]:
    if RunFolder(place).exists():
        yield place
    elif levels:
        with os.scandir(place) as entries:
            names = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
        for name in names:
            yield from _runs_in(place / name, levels - 1)


# ---------------------------------------------------------------------------------------------- one run
def summarize(folder: RunFolder) -> RunSummary:
    """Returns the current state of the run in `folder`."""
    try:
        return _standing(folder)
    except SetupError as error:
        return RunSummary(folder=folder, state="unreadable", changed=_changed(folder), error=error.message)


def _standing(folder: RunFolder) -> RunSummary:
    status, rows = folder.status(), latest_rows(folder.path)
    state = _state(status, folder.is_claimed())
    known: Metrics = status["metrics"] if status else {}
    by_step = sorted([*rows, *read_evaluations(folder.path).values()], key=lambda row: int(row["step"]))
    newest = {name: value for row in by_step for name, value in row.items() if name not in _FACTS}
    return RunSummary(
        folder=folder,
        state=state,
        step=max(status["step"] if status else 0, rows[-1]["step"] if rows else 0),
        total_steps=status.get("total_steps") if status else None,
        attempt=folder.attempts(),
        metrics={**known, **newest} if state in ("running", "killed") else {**newest, **known},
        rate=_rate(rows) if state == "running" else None,
        changed=_changed(folder),
        recipe=flattened(folder.tables()),
        error=status["error"] if status else None,
    )


def _state(status: Status | None, claimed: bool | None) -> str:
    if claimed and (status is None or status["state"] != "running"):
        return "starting"
    if status is None:
        return "new"
    return "killed" if status["state"] == "running" and claimed is False else status["state"]


def _rate(rows: Sequence[Row]) -> float | None:
    mine = [row for row in rows if row["attempt"] == rows[-1]["attempt"]]
    if not mine or (passed := mine[-1]["time"] - mine[0]["time"]) <= 0:
        return None
    return float((mine[-1]["step"] - mine[0]["step"]) / passed) or None


def _changed(folder: RunFolder) -> float:
    files = (folder.path / name for name in ("status.json", "metrics.jsonl", "run.json"))
    return max((file.lstat().st_mtime for file in files if os.path.lexists(file)), default=0.0)


# ---------------------------------------------------------------------------------------------- many runs
def chosen(
    runs: Sequence[RunSummary], *, states: Sequence[str] = (), name: str = "*", where: Sequence[str] = ()
) -> list[RunSummary]:
    """Returns the runs in one of `states` with a name that matches `name` and every KEY=VALUE in the recipe."""
    conditions = list(map(_condition, where))
    return [
        run
        for run in runs
        if (not states or run.state in states)
        and fnmatch.fnmatch(run.folder.path.name, name)
        and all(run.recipe.get(key) == value for key, value in conditions)
    ]


def _condition(text: str) -> tuple[str, Any]:
    from ddpforge.recipe.compose import assigned

    ((key, value),) = flattened(assigned(text)).items()
    return key, value


def sorted_by(runs: Sequence[RunSummary], by: str, *, reverse: bool = False) -> list[RunSummary]:
    """Sorts runs by "age" (newest first), "name", "state", "step" (largest first) or a metric (best first).

    Runs without the metric come last. Raises UsageError if no run has the metric, or if its name does not imply
    whether lower or higher is better.
    """
    keys: dict[str, Callable[[RunSummary], Any]] = {
        "age": lambda run: -run.changed,
        "name": lambda run: str(run.folder.path),
        "state": lambda run: STATES.index(run.state),
        "step": lambda run: -run.step,
    }
    if by in keys:
        return sorted(runs, key=keys[by], reverse=reverse)
    having: list[RunSummary] = []
    lacking: list[RunSummary] = []
    for run in runs:
        value = run.metrics.get(by)
        (lacking if value is None or not math.isfinite(value) else having).append(run)
    lower = lower_is_better(by)
    if not having or lower is None:
        known = sorted({name for run in runs for name in run.metrics})
        problem = f"it is not known if a lower {by} is better" if having else f"no run has a metric {by}"
        raise UsageError(problem, hints=[f"sort by {', '.join(keys)}, or a metric: {', '.join(known) or 'none'}"])
    return sorted(having, key=lambda run: run.metrics[by] or 0.0, reverse=reverse == lower) + lacking


def notable(runs: Sequence[RunSummary]) -> list[str]:
    """Returns the metrics for a list's columns: of `checkpoint.keep.by`, of evaluations, and the training loss."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    deciding = [run.recipe.get("checkpoint.keep.monitor") for run in runs]
    wanted = [
        *(name for name in deciding if isinstance(name, str)),
        *(name for name in names if name.startswith("eval/")),
        "train/loss",
    ]
    return [name for name in dict.fromkeys(wanted) if name in names][:_MOST_METRICS]


def leading(metrics: Iterable[str], most: int | None = 6) -> list[str]:
    """Returns at most `most` metrics: those of evaluations first, then loss and speed, then the others."""

    def place(name: str) -> int:
        known = (name.startswith("eval/"), name == "train/loss", name == "lr", name.endswith("_per_second"))
        return known.index(True) if True in known else 5 if name.startswith("train/time/") else 4

    return sorted(metrics, key=place)[:most]


def differences(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """Returns for each run the recipe keys that differ between the runs of its kind, with its values.

    Runs are of one kind if they have the same `model.use` and the same `use` of their training data. Keys that a
    finished run may change, as its name and folder, are ignored.
    """
    kinds: dict[tuple[str, str], list[RunSummary]] = {}
    for run in runs:
        kinds.setdefault(_kind(run), []).append(run)
    varied = {kind: _varied([run.recipe for run in alike]) for kind, alike in kinds.items()}
    return [{key: run.recipe.get(key) for key in varied[_kind(run)]} for run in runs]


def _kind(run: RunSummary) -> tuple[str, str]:
    # Without `use` there are several sources, each with its own.
    own = [str(value) for key, value in run.recipe.items() if fnmatch.fnmatchcase(key, "data.train.*.use")]
    return str(run.recipe.get("model.use")), str(run.recipe.get("data.train.use", sorted(own)))


def _varied(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    from ddpforge.recipe.schema import Resume, resume_policy

    return [key for key in _different(recipes) if resume_policy(key) is not Resume.NOT_TRAINING]


def _different(recipes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the keys with different values: components first, then learning rates and seeds."""
    keys = dict.fromkeys(key for recipe in recipes for key in recipe)
    return sorted((key for key in keys if _differs(key, recipes)), key=rank_of_key)


def rank_of_key(key: str) -> int:
    """Returns the place of a recipe's key in tables: `use`, learning rates, seeds, then all others."""
    last = key.rpartition(".")[2]
    return ("use", "lr", "seed").index(last) if last in ("use", "lr", "seed") else 3


def _differs(key: str, recipes: Sequence[Mapping[str, Any]]) -> bool:
    """True if runs of the same components have different values of a key: options of another component do not count."""
    names = key.split(".")
    tables = [".".join(names[:end]) for end in range(1, len(names))]
    uses = [f"{table}.use" for table in tables if f"{table}.use" != key]
    values: dict[tuple[Any, ...], Any] = {}
    for recipe in recipes:
        components = tuple(recipe.get(use) for use in uses)
        if values.setdefault(components, recipe.get(key)) != recipe.get(key):
            return True
    return False


# ---------------------------------------------------------------------------------------------- comparison
_PLACE = ("name", "output_dir")  # keys of a recipe: the run's path, which `runs` lists already
_MOMENT = ("time", "command")  # keys of an environment: they differ in every run

Point = tuple[int, float]
P = TypeVar("P", bound=tuple[float, float])
"""Step, and the value of a metric at this step."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Differences between runs: for each key the value in every run, None if a run lacks it.

    `recipe` has the options of a component only if runs with this component differ in them; `environment` has no
    variables in which a launcher numbers its processes, except for WORLD_SIZE.
    `metrics` has the last value of every metric. An evaluation metric with a known direction (lower or higher is
    better) also has its best value, as "eval/loss (best)".
    """

    runs: Sequence[str]
    recipe: Mapping[str, Sequence[Any]]
    code: Mapping[str, Sequence[Any]]
    environment: Mapping[str, Sequence[Any]]
    metrics: Mapping[str, Sequence[float | None]]

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return dict(vars(self))


def compare(folders: Sequence[RunFolder], rows: Sequence[Sequence[Row]] | None = None) -> Comparison:
    """Compares runs with one another; `rows` has their metrics, if the caller has read them already."""
    recipes = [flattened(folder.tables()) for folder in folders]
    around = [flattened(folder.surroundings(launcher=False)) for folder in folders]
    measured = [_summary(mine) for mine in (rows if rows is not None else map(_rows, folders))]
    return Comparison(
        runs=[str(folder.path) for folder in folders],
        recipe={key: [one.get(key) for one in recipes] for key in _different(recipes) if key not in _PLACE},
        code=_unlike([_code(folder) for folder in folders]),
        environment=_unlike([{key: value for key, value in one.items() if key not in _MOMENT} for one in around]),
        metrics={name: [one.get(name) for one in measured] for name in _keys(measured)},
    )


def _keys(tables: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))


def _unlike(tables: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    found = {key: [table.get(key) for table in tables] for key in _keys(tables)}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


def _code(folder: RunFolder) -> dict[str, str]:
    """Returns the first 12 digits of the sha256 of each copy of local code."""
    copies = sorted((folder.path / "code").rglob("*.py"))
    return {path.relative_to(folder.path).as_posix(): sha256(folder.code(path)).hexdigest()[:12] for path in copies}


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
    """Returns the finite values of each metric by run; raises UsageError for a metric that no run has."""
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
            raise UsageError(
                f"no run has a metric {metric}", hints=[f"metrics of these runs: {', '.join(known) or 'none'}"]
            )
    return found


def thinned(points: Sequence[P], most: int) -> list[P]:
    """Returns about `most` points, with the lowest and the highest of each interval, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[P] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(ends)
    return kept
