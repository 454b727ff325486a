"""Gathers the contents of a report, only from the folders of runs. Needs no torch."""

from __future__ import annotations

import base64
import json
import logging
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpforge import __version__, disk
from ddpforge.api import CheckpointFolder, Comparison, Row, RunFolder, RunSummary, flattened, read_metrics, summarize
from ddpforge.api import CheckpointRow as Checkpoint
from ddpforge.runs.checkpoints import rows as checkpoints_of
from ddpforge.runs.media import FOLDER, step_of
from ddpforge.runs.summary import compare
from ddpforge.tools.reports.charts import Chart, charts, skipped
from ddpforge.tools.reports.table import RunTable, table
from ddpforge.tools.reports.time_account import TimeAccount, account_of
from ddpforge.tools.reports.time_advice import advice

__all__ = ["ReportedAttempt", "ReportedMedia", "ReportedRun", "RunReport", "gather"]

log = logging.getLogger("ddpforge")

_SHOWN_BYTES = 600_000  # file sizes of the pictures, texts and tables in a page
_SHOWN_STEPS = 4  # the newest files of one name
_TABLE_ROWS = 50
_PNG = b"\x89PNG\r\n\x1a\n"
_KINDS = {".png": "image", ".json": "json", ".txt": "text"}


@dataclass(frozen=True, kw_only=True)
class ReportedAttempt:
    """Attempt of a run: its first step with a row, and the time of that row (Unix seconds)."""

    number: int
    step: int
    time: float


@dataclass(frozen=True, kw_only=True)
class ReportedMedia:
    """Picture, histogram, text or table that a run has shown; `value` is None if it is too large for the page."""

    name: str
    step: int
    kind: str  # image, histogram, text or table
    path: Path
    value: Any  # for an image its data URL


@dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """Contents of a report on one run."""

    folder: RunFolder
    standing: RunSummary
    attempts: list[ReportedAttempt]
    lineage: list[tuple[int, str]]  # steps after which the recipe changed, and its hash
    skipped: list[int]  # steps of rows that count more skipped steps than the row before
    hours: Mapping[int, float]  # since the first row, by step
    recipe: list[tuple[str, Any, str]]  # key, value, origin
    environment: list[tuple[str, Any]]
    checkpoints: list[Checkpoint]
    shown: list[ReportedMedia]
    left_out: int  # number of shown files that are not in the page: earlier steps
    failure: Mapping[str, Any] | None
    commands: list[str]  # they train the run again
    time: TimeAccount | None
    advice: list[str]  # what would shorten the run

    @property
    def name(self) -> str:
        """Returns the name of the run's folder."""
        return self.folder.path.name


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Contents of a report on some runs."""

    version: str
    made: float  # Unix seconds
    runs: list[ReportedRun]
    charts: list[Chart]
    table: RunTable
    comparison: Comparison | None  # None for a single run

    @property
    def title(self) -> str:
        """Returns the name of the sweep, if all runs are in one folder that is not `runs`; else the runs' names."""
        places = {run.folder.path.absolute().parent for run in self.runs}
        names = [run.name for run in self.runs]
        if len(names) > 1 and len(places) == 1 and (sweep := places.pop().name) not in ("", "runs"):
            return sweep
        return ", ".join(names) if len(names) <= 3 else f"{len(names)} runs"


def gather(folders: Sequence[RunFolder]) -> RunReport:
    """Reads the folders; raises SetupError if one is damaged."""
    rows = [read_metrics(folder.path) if os.path.lexists(folder.metrics) else [] for folder in folders]
    runs = [_run(folder, mine, _SHOWN_BYTES // len(folders)) for folder, mine in zip(folders, rows, strict=True)]
    comparison = compare(folders, rows) if len(folders) > 1 else None
    return RunReport(
        version=__version__,
        made=time.time(),
        runs=runs,
        charts=charts(rows),
        table=table([run.standing for run in runs], comparison),
        comparison=comparison,
    )


def _run(folder: RunFolder, rows: Sequence[Row], room: int) -> ReportedRun:
    environment = folder.surroundings(launcher=False)
    files = _shown_files(folder)
    shown = list(_shown(folder.path / "shown", files, room))
    return ReportedRun(
        folder=folder,
        standing=summarize(folder),
        attempts=list(_attempts(rows)),
        lineage=[(entry["step"], entry["recipe"][:12]) for entry in folder.lineage()],
        skipped=list(skipped(rows)),
        hours={row["step"]: round((row["time"] - rows[0]["time"]) / 3600, 5) for row in rows},
        recipe=list(_recipe(folder, environment.get("command", []))),
        environment=[(key, value) for key, value in flattened(environment).items() if key != "command"],
        checkpoints=checkpoints_of(CheckpointFolder(folder.checkpoints, folder)) if folder.checkpoints.is_dir() else [],
        shown=shown,
        left_out=len(files) - len(shown),
        failure=folder.read_failure(),
        commands=_commands(folder, environment),
        time=(time_account := account_of(folder)),
        advice=[str(one) for one in advice(time_account)] if time_account else [],
    )


def _attempts(rows: Sequence[Row]) -> Iterator[ReportedAttempt]:
    last = None
    for row in rows:
        if row["attempt"] != last:
            last = row["attempt"]
            yield ReportedAttempt(number=last, step=row["step"], time=row["time"])


# ---------------------------------------------------------------------------------------------- the recipe
def _recipe(folder: RunFolder, command: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yields every key with its value and its origin."""
    given = folder.given()
    written, others = flattened(given), "an extended recipe, or a default" if "extends" in given else "default"
    ordered = {word.removeprefix("--set=").partition("=")[0] for word in command if "=" in word}
    for key, value in flattened(folder.tables()).items():
        by_command = any(key == one or key.startswith(f"{one}.") for one in ordered)
        yield key, value, "command line" if by_command else "recipe" if key in written else others


def _commands(folder: RunFolder, environment: Mapping[str, Any]) -> list[str]:
    """Returns the commands that restore the code and train the same run again."""
    git = environment.get("git")
    back = (
        [shlex.join(["git", "checkout", git["commit"]]) + "  # there were uncommitted changes" * git["dirty"]]
        if git
        else []
    )
    versions = {name: version for name, version in (environment.get("packages") or {}).items() if version}
    own = versions.pop("ddpforge", None)
    packages = [
        f"{name}=={version.partition('+')[0]}"  # without the build, as in 2.14.1+cpu: no package index has it
        for name, version in versions.items()
    ]
    install = [shlex.join(["pip", "install", *packages])] if packages else []
    ranks = status["world_size"] if (status := folder.status()) else 1
    words = ["ddpforge", "launch", str(folder.resolved), "--nproc", str(ranks), f"name={folder.path.name}-again"]
    return [*back, *install, shlex.join(words) + (f"  # with ddpforge {own}" if own else "")]


# ---------------------------------------------------------------------------------------------- shown files
def _shown(place: Path, files: Sequence[Path], room: int) -> Iterator[ReportedMedia]:
    """Yields the newest files of each name; those beyond `room` bytes have no value."""
    by_name: dict[str, list[Path]] = {}
    for path in files:
        if path.suffix in _KINDS:
            by_name.setdefault(path.parent.relative_to(place).as_posix(), []).append(path)
    for name, paths in by_name.items():
        for path in paths[-_SHOWN_STEPS:]:
            size = path.lstat().st_size
            fits = size <= room
            room -= size if fits else 0
            step = step_of(path) or 0
            try:
                value = _value(path, place.parent) if fits else None
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                yield ReportedMedia(
                    name=name, step=step, kind="text", path=path, value=f"{path} cannot be shown: {error}"
                )
                continue
            yield ReportedMedia(name=name, step=step, kind=_kind(path, value), path=path, value=value)


def _shown_files(folder: RunFolder) -> list[Path]:
    """Returns the files that the run has shown, oldest first by name; none if the folder is a link."""
    place = folder.path / FOLDER
    if place.is_symlink():
        log.warning("%s is a link: nothing in it is shown", place)
        return []
    return sorted(path for path in place.rglob("step-*") if step_of(path) is not None and disk.is_plain(path))


def _value(path: Path, run: Path) -> Any:
    """Reads a file in the form that a page shows; raises ValueError, TypeError or KeyError for invalid content."""
    content = disk.read_plain(path, _SHOWN_BYTES, within=run)
    if path.suffix == ".png":
        if not content.startswith(_PNG):
            raise ValueError("it is not a PNG image")
        return f"data:image/png;base64,{base64.b64encode(content).decode()}"
    if path.suffix == ".txt":
        return content.decode(errors="replace")
    found = json.loads(content)
    if isinstance(found, list):
        table = found[:_TABLE_ROWS]
        if not all(isinstance(row, dict) for row in table):
            raise ValueError("it is neither a table nor a histogram")
        json.dumps(table)  # raises RecursionError if it is nested too deeply
        return table
    counts, edges = found["counts"], found["edges"]
    numbers = [*counts, *edges, found.get("nonfinite") or 0]
    if (
        not counts
        or len(edges) != len(counts) + 1
        or not all(type(one) in (int, float) and abs(one) < 1e300 for one in numbers)
    ):
        raise ValueError("it is neither a table nor a histogram")
    return {"counts": counts, "edges": edges, "nonfinite": found.get("nonfinite") or 0}


def _kind(path: Path, value: Any) -> str:
    kind = _KINDS[path.suffix]
    return kind if kind != "json" else "table" if isinstance(value, list) else "histogram"
