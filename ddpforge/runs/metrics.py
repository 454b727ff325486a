"""Writes and reads `metrics.jsonl`, a run's own record of its metrics: one JSON object per line."""

import json
import logging
import math
import os
import re
import time
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from ddpforge import disk
from ddpforge.errors import SetupError
from ddpforge.interfaces import Tracker

FILE = "metrics.jsonl"
_RENAMED = {"train/time/step": "train/time/optimizer"}  # as 0.4 and earlier versions wrote them
SUPERSEDED = "metrics.superseded.jsonl"
REPLACED = "metrics.replaced.jsonl"  # a file that another program put in its place
EVALUATIONS = "evaluations"  # folder with a row for each checkpoint that another process evaluated

_TAIL = 1 << 16  # bytes that are read for the newest rows
_FLAWS = (ValueError, TypeError, KeyError, OverflowError, RecursionError)  # raised for a line that is not a row
_MOST = 4 << 30  # bytes of a file
_LONGEST = 4 << 20  # bytes of a row
_BLOCK = 1 << 20  # bytes that are read at a time
_FACTS = frozenset(("step", "attempt", "time"))
_LATEST = 253402300800  # Unix seconds: the year 10000, which datetime does not support

log = logging.getLogger("ddpforge")

Row = dict[str, Any]


class JSONLTracker(Tracker):
    """Writes each row to `metrics.jsonl`: `step`, `attempt`, `time` (Unix seconds) and the metrics.

    JSON has no NaN: a metric that is not finite is written as null and named in the row's `nonfinite` list.
    `attempt` is the number of the run attempt, from 1. A resume moves the rows that it repeats to
    `metrics.superseded.jsonl`, so that each step has one version. If the file is removed during training, it is
    written again, with a warning. Unlike other trackers, this one raises SetupError if it cannot write.
    """

    rows = 0  # in the file
    _kept: FileIO

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Continues the file of earlier attempts; without `resumed_at` all of their rows are superseded.

        Reads the attempt from `config["run"]["attempt"]`; if that is missing, uses the largest in the files plus 1.
        """
        self._path, self._superseded = folder / FILE, folder / SUPERSEDED
        attempt, files = config.get("run", {}).get("attempt"), (self._path, self._superseded)
        self._attempt = attempt or 1 + max((row["attempt"] for path in files for row in _parse(path)), default=0)
        if any(b"\0" in block for block in _blocks(self._path)):
            _replace(self._path, _parse(self._path))
        self.rewind(-1 if resumed_at is None else resumed_at)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one line. On return, the operating system has it: a crash of the process does not lose it."""
        with _explained(self._path):
            self._mend()
            left = memoryview(line_of(step, self._attempt, metrics))
            while left:  # a full disk accepts a part, and then raises OSError
                left = left[self._kept.write(left) :]
            self._size = self._kept.tell()
        self.rows += 1

    def rewind(self, step: int) -> None:
        """Moves the rows after `step`, also of evaluations by followers, to the superseded ones."""
        with _explained(self._path):
            _touch(self._path)
            try:
                begin, drop = _after(self._path, step)
            except _FLAWS:
                _replace(self._path, _parse(self._path))  # raises with the number of the damaged line
                begin, drop = _after(self._path, step)
        beside = {name: row for name, row in read_evaluations(self._path.parent).items() if row["step"] > step}
        if drop := [*drop, *(_line(row).encode() for row in beside.values())]:
            _append(self._superseded, drop)  # before the cut, so that a crash loses no row
        for name in beside:
            evaluation_file(self._path.parent, name).unlink(missing_ok=True)
        with _explained(self._path):
            _cut(self._path, begin)
            with self._path.open("rb") as file:
                self.rows = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        self._keep()

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Writes the file again if it was removed, and closes it."""
        with _explained(self._path):
            self._mend()
        self._kept.close()

    def _keep(self) -> None:
        """Keeps the file open: if it is removed, its rows can still be read."""
        with suppress(AttributeError):
            self._kept.close()
        with _explained(self._path):
            self._kept = disk.open_plain(self._path, "a+b", buffering=0)
        self._size = self._kept.tell()

    def _mend(self) -> None:
        """Writes the file again, with a warning, if it was removed or replaced."""
        try:
            there = self._path.lstat()
        except FileNotFoundError:
            there = None
        if there and os.path.samestat(there, os.fstat(self._kept.fileno())):
            if there.st_size < self._size:
                log.warning("rows were removed from %s during training", self._path)
            return
        if there and there.st_size:
            os.replace(self._path, self._path.with_name(REPLACED))
        self._kept.seek(0)
        _write(self._path, self._kept.read())
        log.warning("%s was removed or replaced during training: all its rows were written again", self._path)
        self._keep()


def read_metrics(folder: Path) -> list[Row]:
    """Returns the rows of the run in `folder`, one per step, in order. Values that were not finite are NaN.

    The training and evaluation rows of a step are merged, also those of `read_evaluations`. An incomplete last line, of
    a running or killed run, is skipped. Raises SetupError if there is no file or it is damaged.
    """
    path = folder / FILE
    if not os.path.lexists(path):
        raise SetupError(f"there is no {path}", hints=["name the folder of a run"])

    steps: dict[int, Row] = {}
    # Rows of the run are later, so that `attempt` and `time` are those of training.
    beside = [row for row in read_evaluations(folder).values() if any("/" in name for name in row)]
    for row in [*beside, *_parse(path)]:
        row |= dict.fromkeys(row.pop("nonfinite", ()), math.nan)
        row |= {name: math.nan for name, value in row.items() if value is None}
        steps.setdefault(row["step"], {}).update(row)
    return sorted(steps.values(), key=lambda row: int(row["step"]))


def read_evaluations(folder: Path) -> dict[str, Row]:
    """Returns the rows that followers wrote into the run `folder`, by checkpoint; the later of a step comes last.

    A row without metrics is of a damaged checkpoint. Raises SetupError for a damaged file.
    """
    paths = (folder / EVALUATIONS).glob("step-*.json")
    found = {path.stem: row for path in paths for row in _parse(path)[:1]}
    return dict(sorted(found.items(), key=lambda each: (each[1]["step"], each[1]["time"])))


def evaluation_file(folder: Path, checkpoint: str) -> Path:
    """Returns the path of the row that a follower writes for a checkpoint of the run `folder`."""
    return folder / EVALUATIONS / f"{checkpoint}.json"


def latest_rows(folder: Path) -> list[Row]:
    """Returns the newest rows (about a hundred) of the run in `folder`, not merged; none if there is no file."""
    try:
        _, lines = _last(folder / FILE, _TAIL)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder / FILE, error) from error
    try:
        return _rows(lines, folder / FILE)
    except SetupError:
        return _parse(folder / FILE)  # counts lines from the first, for the error message


# ---------------------------------------------------------------------------------------------- from the end on
def _last(path: Path, most: int) -> tuple[int, list[bytes]]:
    """Returns the lines that begin in the last `most` bytes of a file, and the offset of the first one."""
    with disk.open_plain(path) as file:
        start = max(0, os.fstat(file.fileno()).st_size - most)
        file.seek(start)
        lines = file.read().splitlines(keepends=True)
    return (start + len(lines.pop(0)), lines) if start else (0, lines)


def _after(path: Path, step: float) -> tuple[int, list[bytes]]:
    """Returns the offset of the first row after `step`, and the lines from there, without an incomplete last line."""
    # Rows are sorted by step, so reading backwards in doubling blocks reads little more than these rows.
    most = _TAIL
    while True:
        start, lines = _last(path, most)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if start == 0 or (lines and _row(lines[0])["step"] <= step):
            break
        most *= 2
    stay = bisect_right([_row(line)["step"] for line in lines], step)
    return start + sum(map(len, lines[:stay])), lines[stay:]


def _append(path: Path, lines: list[bytes]) -> None:
    with _explained(path):
        _touch(path)
        with suppress(*_FLAWS):  # of older rows: their readers get the error
            _cut(path, _after(path, math.inf)[0])
        with disk.open_plain(path, "ab") as file:
            file.writelines(lines)
            _sync(file)


def _cut(path: Path, size: int) -> None:
    """Shortens the file durably; after a crash it has its old length or the new one."""
    if disk.plain_size(path) == size:
        return
    with disk.open_plain(path, "r+b") as file:
        os.truncate(file.fileno(), size)
        _sync(file)


def _touch(path: Path) -> None:
    """Creates the file if it is missing; raises OSError for a link, even for a dangling one."""
    disk.open_plain(path, "ab").close()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------- all of it
def _parse(path: Path) -> list[Row]:
    return _rows(_lines(path), path)


def _lines(path: Path) -> list[bytes]:
    """Returns the lines of the file; none if there is no file. A sequence of zero bytes becomes one zero byte."""
    lines: list[bytes] = []
    rest = b""
    for block in _blocks(path):
        *whole, rest = (rest + re.sub(rb"\0+", b"\0", block)).split(b"\n")
        lines += (line + b"\n" for line in whole)
        if len(rest) > _LONGEST:
            raise _unreadable(path, f"line {len(lines) + 1} is longer than any row")
    return [*lines, rest] if rest else lines


def _blocks(path: Path) -> Iterator[bytes]:
    """Yields the contents of the file in blocks; nothing if there is no file."""
    try:
        with disk.open_plain(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST:
                raise _unreadable(path, f"it has more than {_MOST:,} bytes")
            yield from iter(lambda: file.read(_BLOCK), b"")
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, why: OSError | str) -> SetupError:
    said = (why.strerror or why) if isinstance(why, OSError) else why
    return SetupError(f"{path} cannot be read: {said}", hints=["repair the file, or move it away"])


def _rows(lines: list[bytes], path: Path) -> list[Row]:
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # an incomplete write, after a crash

    rows = []
    for number, line in enumerate(lines, start=1):
        zeros = b"\0" in line
        for piece in filter(bytes.strip, line.split(b"\0")):  # never joined: halves of two rows may look like a row
            try:
                rows.append(_row(piece))
            except _FLAWS as error:
                if not zeros:
                    message = f"{path}, line {number} is not a row of metrics"
                    hints = ["repair or remove the line, or move the file away"]
                    raise SetupError(message, hints=hints) from error
    if any(b"\0" in line for line in lines):
        log.warning("%s contains zero bytes, probably after a power failure: the rows in these places are lost", path)
    return rows


def _row(text: bytes) -> Row:
    row: Row = json.loads(text)
    step, attempt, when = row["step"], row["attempt"], row.setdefault("time", 0.0)
    if type(step) is not int or type(attempt) is not int or not (-1 <= step < 2**63 and 0 <= attempt < 2**63):
        raise ValueError("step and attempt must be whole numbers")
    odd = row.get("nonfinite", ())
    if not (0 <= when < _LATEST) or (odd and not (isinstance(odd, list) and all(isinstance(one, str) for one in odd))):
        raise ValueError("`time` is not a time, or `nonfinite` is not a list of metric names")
    if not _FACTS.isdisjoint(odd):
        raise ValueError("step, attempt and time must be finite")
    for name, value in row.items():
        if name != "nonfinite" and value is not None:
            if not isinstance(value, int | float):
                raise ValueError("a metric is not a number")
            float(value)  # raises OverflowError
    for old, new in _RENAMED.items():
        if old in row:
            row[new] = row.pop(old)
    return row


def renamed_metric(name: str) -> str:
    """Returns the present name of a metric of 0.4 or an earlier version."""
    return _RENAMED.get(name, name)


def _replace(path: Path, rows: list[Row]) -> None:
    """Rewrites the file atomically: after a crash, `path` has the old content or the new."""
    with _explained(path):
        _write(path, "".join(map(_line, rows)).encode())


def _write(path: Path, content: bytes) -> None:
    new = path.with_suffix(".tmp")
    disk.remove(new)  # left by a killed process, or a link
    with new.open("xb") as file:
        file.write(content)
        _sync(file)
    os.replace(new, path)


def line_of(step: int, attempt: int, metrics: Mapping[str, float]) -> bytes:
    """Returns the line of a row that is written now."""
    row: Row = {"step": step, "attempt": attempt, "time": round(time.time(), 3)}
    row |= {key: value if math.isfinite(value) else None for key, value in metrics.items()}
    if nonfinite := [key for key, value in metrics.items() if not math.isfinite(value)]:
        row["nonfinite"] = nonfinite
    return _line(row).encode()


def _line(row: Row) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise SetupError(message, hints=["check if the disk is full, the folder read-only, or removed"]) from error
