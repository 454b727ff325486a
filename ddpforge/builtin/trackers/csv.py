"""CSV file of metrics, for spreadsheets and pandas."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from ddpforge.errors import SetupError
from ddpforge.interfaces import Tracker

__all__ = ["CSVTracker"]

_MOST = 1 << 30  # bytes

Row = Mapping[str, float | str]


class CSVTracker(Tracker):
    """Writes `metrics.csv` in the run's folder: a column for `step` and for each metric, a line for each row.

    Training and evaluation rows of the same step are two lines; missing metrics are empty. The file is rewritten when a
    metric appears for the first time, and when training goes back, which removes the superseded rows.
    """

    def __init__(
        self,
        file: Annotated[
            str, Field(pattern=r"^[\w.-]+\.csv$", description="Name of the file in the run's folder.")
        ] = "metrics.csv",
    ) -> None:
        self._name = file

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Keeps the rows of earlier attempts, up to the step that training resumes from."""
        self._path = folder / self._name
        self._columns = ["step"]
        rows = _read(self._path)
        for row in rows:
            self._columns += [column for column in row if column not in self._columns]
        self._write(row for row in rows if int(row["step"]) <= (-1 if resumed_at is None else resumed_at))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends a line."""
        if new := [metric for metric in metrics if metric not in self._columns]:
            rows = _read(self._path)
            self._columns += new
            self._write(rows)
        with self._path.open("a", newline="") as file:
            csv.DictWriter(file, self._columns).writerow({"step": step, **metrics})

    def rewind(self, step: int) -> None:
        """Removes the rows after `step`."""
        self._write([row for row in _read(self._path) if int(row["step"]) <= step])

    def _write(self, rows: Iterable[Row]) -> None:
        """Replaces the file atomically."""
        new = self._path.with_name(f".{self._path.name}.tmp")
        with new.open("w", newline="") as file:
            writer = csv.DictWriter(file, self._columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(new, self._path)


def _read(path: Path) -> list[dict[str, str]]:
    """Reads the rows of a file, without an incomplete last line; returns none if there is no file."""
    if not path.exists():
        return []
    try:
        if path.stat().st_size > _MOST:
            raise ValueError(f"it has more than {_MOST:,} bytes")
        with path.open(newline="", encoding="utf-8") as file:
            whole = [line for line in file if line.endswith("\n")]
        rows = list(csv.DictReader(whole))
        for row in rows:
            int(row["step"])
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise SetupError(
            f"{path} is not a table of metrics: {error}", hints=["move it away: metrics.jsonl has all rows"]
        ) from error
    return rows
