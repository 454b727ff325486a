"""Reads CSV files row by row: every row with its line, and an error for a file that would be read as something else."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TextIO

from ddpforge.builtin.datasets.listing import other_kind
from ddpforge.errors import SetupError, UsageError, not_there

__all__ = ["Rows", "is_number", "not_a_number", "numbers"]

_LONGEST = 2**26  # characters of a line: a file without line breaks would fill the memory
_BEGIN = 2**16  # bytes that are looked at before the file is read
_SHOWN = 20  # columns in a message
_DELIMITERS = {",": ",", ";": ";", "\\t": "\t", "|": "|"}  # as a recipe writes them

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_PLAIN = re.compile(r"[-+.0-9eE \t]*", re.ASCII)  # cells that `float` accepts and Python alone writes have others


@dataclass(frozen=True)
class Rows:
    """Header and rows of a CSV file. Memory holds one row.

    Raises:
        SetupError: There is no such file, or it is a device or a pipe.
        UsageError: The file has another kind, encoding or delimiter, an unclosed quote, a line with another number of
            cells, or several columns of one name.
    """

    path: Path
    names: Sequence[str]
    delimiter: str

    @classmethod
    def of(cls, path: Path, delimiter: str) -> Rows:
        """Reads the header."""
        if not path.is_file():
            what = "is not a regular file" if path.exists() else "does not exist"
            raise SetupError(f"path: there is no file {path}: it {what}", hints=not_there(path))
        _reject_other_kind(path)
        _, names = next(_read(path, delimiter), (1, []))
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            places = [number for number, name in enumerate(names, 1) if name == twice[0]]
            raise UsageError(
                f"{path}:1 has several columns {twice[0]!r}: {', '.join(map(str, places[:_SHOWN]))}",
                hints=["give each a name of its own"],
                key="path",
            )
        return cls(path, names, delimiter)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.names)}

    def place(self, name: str, key: str) -> int:
        """Returns the number of a column; raises UsageError, at the option `key`, if there is none of this name."""
        if name in self._places:
            return self._places[name]
        shown = [repr(one) if one != one.strip() else one for one in self.names[:_SHOWN]]
        hints = [f"{self.path} has {', '.join(shown)}{' …' * (len(self.names) > _SHOWN)}"]
        if not self.names:
            hints = [f"{self.path} is empty; its first line must have the names of the columns"]
        elif any(map(is_number, self.names)) or self.names[0][:1] in ("#", "[", "{", "<"):
            hints.insert(0, "its first line must have the names of the columns")
        if near := next((one for one in self.names if one.strip() == name.strip()), None):
            hints.insert(0, f"the header has {near!r}, with spaces: remove them")
        elif near := next((one for one in self.names if one.casefold() == name.casefold()), None):
            hints.insert(0, f"did you mean {near!r}?")
        for written, delimiter in _DELIMITERS.items():
            if delimiter != self.delimiter and name in self.delimiter.join(self.names).split(delimiter):
                hints.insert(0, f'its columns are separated by "{written}": set delimiter = "{written}"')
        if key == "target" and len(self.names) > 1:
            hints.append("samples without targets can be predicted: labeled = false")
        raise UsageError(f"{key}: there is no column {name!r} in {self.path}:1", hints=hints, key=key)

    def read(self, used: Sequence[int]) -> Iterator[tuple[int, list[str]]]:
        """Yields the line and the cells of each row; a cell in the `used` columns has no line break."""
        rows = _read(self.path, self.delimiter)
        next(rows, None)
        for line, row in rows:
            if len(row) != len(self.names):
                raise UsageError(
                    f"{self.path}:{line} has another number of cells than the {len(self.names)} columns of the header: "
                    f"{len(row)}",
                    hints=[f"is a delimiter {self.delimiter!r} missing, or one in a cell without quotes?"],
                    key="path",
                )
            if any("\n" in cell or "\r" in cell for cell in row):
                self._check_breaks(line, row, used)
            yield line, row

    def _check_breaks(self, line: int, row: Sequence[str], used: Sequence[int]) -> None:
        """Raises UsageError for a cell with a line break in a used column, or whose lines look like rows."""
        for place, cell in enumerate(row):
            first, *others = cell.splitlines() or [""]
            counts = [text.count(self.delimiter) for text in (first, *others)]
            last = len(self.names) - 1
            # A quote that was never meant as one swallows the rows up to the next quote in the same column.
            swallowed = others and counts == [last - place, *[last] * (len(others) - 1), place]
            if others and (place in used or swallowed):
                raise UsageError(
                    f"{self.path}:{line}: the cell in column {self.names[place]!r} begins with a quote and goes on for "
                    f"{len(others)} more line(s): {cell[:40]!r}",
                    hints=["remove the quote, or write a quote in a cell as two quotes in a quoted cell"],
                    key="path",
                )


def _reject_other_kind(path: Path) -> None:
    """Raises UsageError for a file that is compressed, a table of another kind, or text in another encoding."""
    with path.open("rb") as file:
        begin = file.read(_BEGIN)
    if found := other_kind(begin):
        raise UsageError(f"{path} {found[0]}, not CSV in UTF-8", hints=[found[1]], key="path")
    if b"\0" in begin:
        line = begin[: begin.index(b"\0")].count(b"\n") + 1
        raise UsageError(
            f"{path}:{line} has zero bytes, so the file is not text in UTF-8",
            hints=["write it as UTF-8, e.g. iconv -f UTF-16LE -t UTF-8"],
            key="path",
        )


def _read(path: Path, delimiter: str) -> Iterator[tuple[int, list[str]]]:
    """Yields the first line and the cells of each row that is not empty."""
    begin, reader = 1, None
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            reader = csv.reader(_lines(path, file), delimiter=delimiter, strict=True)
            for row in reader:
                if row:
                    yield begin, row
                begin = reader.line_num + 1
        except csv.Error as error:
            what = str(error)
            if "unexpected end of data" in what or "field limit" in what:
                what = "a cell begins with a quote that is not closed"
            elif "expected after" in what:
                what = "a quote in a quoted cell is not doubled"
            raise UsageError(
                f"{path}:{begin}: {what}",
                hints=["remove the quote, or write a quote in a cell as two quotes in a quoted cell"],
                key="path",
            ) from error
        except UnicodeDecodeError as error:
            raise _not_utf8(path) from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    """Yields the lines; raises UsageError for one that is too long or has a zero byte."""
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        if "\0" in line:
            raise UsageError(f"{path}:{number} has a zero byte, so it is not text", key="path")
        if len(line) == _LONGEST:
            raise UsageError(f"{path}:{number} has more than {_LONGEST:,} characters in one line", key="path")
        yield line


def _not_utf8(path: Path) -> UsageError:
    """Returns an error with the line and the column of the first byte that is not UTF-8."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                place = len(line[: error.start].decode("utf-8")) + 1
                byte = line[error.start]
                return UsageError(
                    f"{path}:{number}:{place} has the byte 0x{byte:02x}, which is not UTF-8",
                    hints=["write the file as UTF-8, e.g. iconv -f WINDOWS-1252 -t UTF-8"],
                    key="path",
                )
    return UsageError(f"{path} is not UTF-8", key="path")


# ---------------------------------------------------------------------------------------------- numbers
def is_number(cell: str) -> bool:
    """True for a decimal number, as CSV files have them; False for nan, inf and Python's `1_0`."""
    return _NUMBER.fullmatch(cell) is not None


def numbers(cells: Sequence[str]) -> list[float] | None:
    """Returns the cells as numbers; None if one is not a finite decimal number."""
    try:
        found = [float(cell) for cell in cells]
    except ValueError:
        return None
    plain = all(map(_PLAIN.fullmatch, cells)) and all(map(math.isfinite, found))
    return found if plain else None


def not_a_number(rows: Rows, line: int, place: int, cell: str, *, key: str, hints: Sequence[str]) -> UsageError:
    """Returns the error for a cell that is not a number, with its line, its column and its value."""
    what = "is not a number" + ("; it is empty" if not cell.strip() else "")
    if re.fullmatch(r"\s*[+-]?\d{1,3}(,\d{3})+(\.\d*)?\s*", cell, re.ASCII):
        hints = [f"write it without separators of thousands: {cell.replace(',', '').strip()}", *hints]
    elif re.fullmatch(r"\s*[+-]?\d+,\d+\s*", cell, re.ASCII):
        hints = [f"write it with a decimal point: {cell.replace(',', '.').strip()}", *hints]
    elif is_number(cell):
        what = "is too large for float32"
    shown = f"{cell[:60]!r}{'…' * (len(cell) > 60)}"
    return UsageError(f"{rows.path}:{line}: {shown} in column {rows.names[place]!r} {what}", hints=hints, key=key)
