"""Locates the keys and values of a recipe in its text, to the line and column."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from ddpforge.errors import Place

KeyPath = tuple[str | int, ...]
"""A key of a recipe, or an element of an array in it: ("data", "train", "use")."""

_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]*")
_PLAIN = re.compile(r"[^#\n]*")
_PLAIN_INSIDE = re.compile(r"[^,\]}#\n]*")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """A text that sets values: a recipe file (`label` is its path as people should see it) or one `--set`."""

    label: str
    text: str
    folder: Path = Path()

    def place(self, path: KeyPath, *, key: bool = False) -> Place:
        """The value at `path`, or its key; where it is not written out, the nearest table around it."""
        spans = self._spans.keys if key else self._spans.values
        while path not in spans:
            if not path:
                return Place(self.label)
            path = path[:-1]
        return self.at(*spans[path])

    def at(self, start: int, end: int) -> Place:
        """The place of `text[start:end]`, as far as it stands on one line."""
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", start)
        last = len(self.text) if last < 0 else last
        width = max(1, min(end, last) - start)
        return Place(self.label, self.text.count("\n", 0, start) + 1, start - first + 1, width, self.text[first:last])

    @cached_property
    def _spans(self) -> _Spans:
        return _Spans(self.text)


@dataclass(frozen=True)
class Origin:
    """The origin of one value of a resolved recipe; without a source it is a default."""

    source: Source | None = None
    path: KeyPath = ()
    through: tuple[tuple[str, Origin | None], ...] = ()  # what was filled in, and where a variable comes from

    def place(self, *, key: bool = False) -> Place | None:
        """The value's place, or its key's."""
        return self.source.place(self.path, key=key) if self.source else None

    def __str__(self) -> str:
        if self.source is None:
            return "default"
        line = self.source.place(self.path, key=True).line
        where = self.source.label if self.source.label == "--set" else f"{self.source.label}:{line}"
        filled = [f"{name} from {origin}" if origin else name for name, origin in self.through]
        return ", ".join([where, *filled])


@dataclass
class _Spans:
    """Start and end of every key and value in a TOML text that tomllib has accepted.

    Neither tomllib nor tomlkit says where things stand, so the text is walked once more, for messages only.
    """

    text: str
    keys: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    values: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    _at: int = 0
    _elements: dict[KeyPath, int] = field(default_factory=dict)  # arrays of tables: index of the last one

    def __post_init__(self) -> None:
        table: KeyPath = ()
        while self._next(_GAP):
            if self._next() == "[":
                table = self._header()
            else:
                self._pair(table, _PLAIN)

    def _next(self, skip: re.Pattern[str] = _BLANK) -> str:
        """The next character after what `skip` matches; empty at the end."""
        self._skip(skip)
        return self.text[self._at : self._at + 1]

    def _skip(self, pattern: re.Pattern[str]) -> None:
        if found := pattern.match(self.text, self._at):
            self._at = found.end()

    def _header(self) -> KeyPath:
        double = self.text.startswith("[[", self._at)
        self._at += 1 + double
        parts = list(self._key())
        self._at += 1 + double

        path: KeyPath = ()
        for name, start, end in parts:
            path = (*path, name)
            if double and end == parts[-1][2]:
                self._elements[path] = self._elements.get(path, -1) + 1
            self.keys.setdefault(path, (start, end))
            self.values.setdefault(path, (start, end))
            if path in self._elements:
                path = (*path, self._elements[path])
        self.keys[path] = self.values[path] = (parts[0][1], parts[-1][2])
        return path

    def _pair(self, table: KeyPath, plain: re.Pattern[str]) -> None:
        path = table
        for name, start, end in self._key():
            path = (*path, name)
            self.keys.setdefault(path, (start, end))
            self.values.setdefault(path, (start, end))
        self._at += 1  # the `=`
        self._next()
        self._value(path, plain)

    def _key(self) -> Iterator[tuple[str, int, int]]:
        """The parts of a dotted key, with the start and end of each."""
        while True:
            quoted = self._next() in ("'", '"')
            start = self._at
            self._skip(_STRING if quoted else _BARE_KEY)
            name = self.text[start : self._at]
            yield (tomllib.loads(f"k={name}")["k"] if quoted else name), start, self._at
            if self._next() != ".":
                return
            self._at += 1

    def _value(self, path: KeyPath, plain: re.Pattern[str]) -> None:
        start = self._at
        match self.text[start : start + 1]:
            case "[":
                self._inside(path, "]")
            case "{":
                self._inside(path, "}")
            case "'" | '"':
                self._skip(_STRING)
            case _:
                self._skip(plain)
        written = self.text[start : self._at].rstrip()
        self.values[path] = (start, start + len(written))

    def _inside(self, path: KeyPath, closing: str) -> None:
        """The elements of an array or of an inline table."""
        self._at += 1
        index = 0
        while self._next(_GAP) != closing:
            if closing == "]":
                self._value((*path, index), _PLAIN_INSIDE)
            else:
                self._pair(path, _PLAIN_INSIDE)
            index += 1
            if self._next(_GAP) == ",":
                self._at += 1
        self._at += 1
