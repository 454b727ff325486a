"""The truth about a run: `metrics.jsonl` in its folder, one JSON object a line."""

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpforge.errors import EnvironmentProblem
from ddpforge.interfaces import Tracker

FILE = "metrics.jsonl"
SUPERSEDED = "metrics.superseded.jsonl"

Row = dict[str, Any]


class JSONLTracker(Tracker):
    """Writes each row to `metrics.jsonl`: `step`, `attempt`, `time` (Unix seconds) and the metrics.

    JSON has no NaN: a metric that is not finite is written as null and named in the row's `nonfinite` list.
    `attempt` counts the processes that wrote the file, from 1. Rows that a resume repeats are moved to
    `metrics.superseded.jsonl`, so that each step stays in one version. Unlike other trackers this one raises
    EnvironmentProblem when it cannot write.
    """

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Takes over the file of earlier attempts; without `resumed_at` all of their rows are superseded."""
        self._path, self._superseded = folder / FILE, folder / SUPERSEDED
        earlier = _parse(self._path) + _parse(self._superseded)
        self._attempt = 1 + max((row["attempt"] for row in earlier), default=0)
        self.rewind(-1 if resumed_at is None else resumed_at)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line, which has left the process when this returns."""
        row: Row = {"step": step, "attempt": self._attempt, "time": round(time.time(), 3)}
        row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
        if nonfinite := [key for key, value in metrics.items() if not math.isfinite(value)]:
            row["nonfinite"] = nonfinite
        with _explained(self._path), self._path.open("a") as file:
            file.write(_line(row))

    def rewind(self, step: int) -> None:
        """Supersedes the rows after `step`."""
        rows = _parse(self._path)
        keep = [row for row in rows if row["step"] <= step]
        drop = [row for row in rows if row["step"] > step]
        if drop:
            _replace(self._superseded, _parse(self._superseded) + drop)  # first, so that a crash loses none
        _replace(self._path, keep)


def read_metrics(folder: Path) -> list[Row]:
    """The rows of the run in `folder`, one a step, in order; what was not finite is NaN.

    The training and evaluation rows of a step are merged. The line that a live or killed run has only half
    written is left out. Raises EnvironmentProblem when there is no file or it is damaged.
    """
    path = folder / FILE
    if not path.exists():
        raise EnvironmentProblem(f"there is no {path}", hints=["name the folder of a run"])

    steps: dict[int, Row] = {}
    for row in _parse(path):
        row |= dict.fromkeys(row.pop("nonfinite", ()), math.nan)
        steps.setdefault(row["step"], {}).update(row)
    return list(steps.values())


def _parse(path: Path) -> list[Row]:
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a write that was cut short by a crash

    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            row["step"], row["attempt"]
        except (ValueError, TypeError, KeyError) as error:
            message = f"{path}, line {number} is not a row of metrics"
            raise EnvironmentProblem(message, hints=["mend or remove the line, or move the file away"]) from error
        rows.append(row)
    return rows


def _replace(path: Path, rows: list[Row]) -> None:
    """Writes the file anew; whatever happens, `path` holds the old content or the new."""
    new = path.with_suffix(".tmp")
    with _explained(path):
        with new.open("w") as file:
            file.writelines(map(_line, rows))
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise EnvironmentProblem(message, hints=["is the disk full, or the folder read-only?"]) from error
