"""Reads TOML with the standard library; finds the place of every key in its text, for errors with place and hint."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ddpforge.errors import Diagnostic, RecipeError, SourceSpan
from ddpforge.recipe.report import KeyPath, dotted, kind_of, printable

_BLANK = re.compile(r"[ \t]*")
_GAP = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]*")
_PLAIN = re.compile(r"[^#\n]*")
_PLAIN_INSIDE = re.compile(r"[^,\]}#\n]*")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"{3,5}' r"|'''.*?'{3,5}" r'|"(?:\\.|[^"\\])*"' r"|'[^']*'", re.DOTALL)


@dataclass(frozen=True)
class Source:
    """Text that sets values: a recipe file (`label` is its path for messages) or one `--set`."""

    label: str
    text: str
    folder: Path = Path()

    def place(self, path: KeyPath, *, key: bool = False) -> SourceSpan:
        """Returns the place of the value at `path`, or of its key; if it is not in the text, of the table around it."""
        spans = self._spans.keys if key else self._spans.values
        while path not in spans:
            if not path:
                return SourceSpan(self.label)
            path = path[:-1]
        return self.at(*spans[path])

    def parts(self) -> list[tuple[KeyPath, int, int]]:
        """Returns the path, start and end of each part of each key, as often as the text has it."""
        return self._spans.parts

    def value(self, path: KeyPath) -> tuple[int, int]:
        """Returns the start and end of the value at `path`; raises KeyError if the text has no such value."""
        return self._spans.values[path]

    def at(self, start: int, end: int) -> SourceSpan:
        """Returns the place of `text[start:end]`, up to the end of the line."""
        first = self.text.rfind("\n", 0, start) + 1
        last = self.text.find("\n", start)
        last = len(self.text) if last < 0 else last
        width = max(1, min(end, last) - start)
        return SourceSpan(
            self.label, self.text.count("\n", 0, start) + 1, start - first + 1, width, self.text[first:last]
        )

    @cached_property
    def _spans(self) -> _Spans:
        return _Spans(self.text)


@dataclass(frozen=True)
class Origin:
    """Origin of one value of a resolved recipe; without a source, a default."""

    source: Source | None = None
    path: KeyPath = ()
    through: tuple[tuple[str, Origin | None], ...] = ()  # replaced references, and the origin of a variable

    def place(self, *, key: bool = False) -> SourceSpan | None:
        """Returns the place of the value, or of its key."""
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
    """Start and end of every key and value in a TOML text that tomllib has accepted; for messages only."""

    # Neither tomllib nor tomlkit returns positions, so this parses the text once more.
    text: str
    keys: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    values: dict[KeyPath, tuple[int, int]] = field(default_factory=dict)
    parts: list[tuple[KeyPath, int, int]] = field(default_factory=list)  # each part of each key, as often as written
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
        """Returns the next character after the match of `skip`; empty at the end."""
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
            self.parts.append((path, start, end))
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
            self.parts.append((path, start, end))
            self.keys.setdefault(path, (start, end))
            self.values.setdefault(path, (start, end))
        self._at += 1  # the `=`
        self._next()
        self._value(path, plain)

    def _key(self) -> Iterator[tuple[str, int, int]]:
        """Yields the parts of a dotted key, with the start and end of each."""
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
        """Reads the elements of an array or of an inline table."""
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


Value = Any  # any TOML value
Table = dict[str, Value]

_DEEPEST = 16
_MOST = 4 << 20  # characters
# The time of tomllib grows with the square of a key's parts. The pattern starts only at the beginning of a part and
# does not backtrack: otherwise a hundred thousand digits would take minutes.
_TOO_DOTTED = re.compile(
    rf"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*+){{{4 * _DEEPEST}}}"""
)
_TOO_DEEP = re.compile(rf"(?:[\[{{][^\[\]{{}}]*){{{_DEEPEST + 1}}}")  # brackets opened and not closed
_WHERE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)")
_LOWER_CASE = {"True": "true", "False": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}


def read(path: Path, label: str) -> Source:
    """Reads the file `path`. Raises RecipeError if it cannot be read or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(4 * _MOST + 1)  # a limit, because e.g. a device has no end
    except OSError as error:
        raise RecipeError([Diagnostic(f"cannot read `{label}`: {error.strerror}", place=SourceSpan(label))]) from error

    folder = path.absolute().parent
    try:
        return Source(label, data.decode("utf-8-sig").replace("\r\n", "\n"), folder)
    except UnicodeDecodeError as error:
        source = Source(label, data.decode("utf-8", "replace"), folder)
        start = source.text.index("\ufffd", len(data[: error.start].decode()))
        problem = Diagnostic(
            f"not UTF-8 text: byte 0x{data[error.start]:02x}",
            place=source.at(start, start + 1),
            hints=("save the file as UTF-8",),
        )
        raise RecipeError([problem]) from error


def loads(text: str) -> Table:
    """Parses an untrusted text; raises ValueError if it is not TOML, too long or nested too deeply."""
    if len(text) > _MOST:
        raise ValueError(f"it has {len(text):,} characters, more than any recipe")
    if _TOO_DOTTED.search(text):
        raise ValueError("a key in it has more parts than any recipe's")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse(source: Source) -> Table:
    """Parses one text. Raises RecipeError for bad syntax and for values that are not allowed in a recipe."""
    if len(source.text) > _MOST:
        raise RecipeError(
            [Diagnostic(f"too long for a recipe: {len(source.text):,} characters", place=SourceSpan(source.label))]
        )
    if dotted_key := _TOO_DOTTED.search(source.text):
        place = source.at(*dotted_key.span())
        raise RecipeError([Diagnostic(f"nested too deeply: at most {_DEEPEST} levels", place=place)])
    try:
        table = tomllib.loads(source.text)
    except RecursionError as error:
        opened = _TOO_DEEP.search(source.text)
        place = source.at(*opened.span()) if opened else SourceSpan(source.label)
        raise RecipeError([Diagnostic(f"nested too deeply: at most {_DEEPEST} levels", place=place)]) from error
    except ValueError as error:  # besides TOMLDecodeError, an integer of thousands of digits
        raise RecipeError([_syntax_problem(source, str(error))]) from error

    if problems := list(_unusable(table, source)):
        raise RecipeError(problems)
    return table


def _unusable(table: Table, source: Source) -> Iterator[Diagnostic]:
    todo: list[tuple[KeyPath, object]] = [((), table)]
    while todo:
        path, value = todo.pop()
        message, hint = "", ""
        if len(path) > _DEEPEST:
            message = f"nested too deeply: at most {_DEEPEST} levels"
        elif isinstance(value, dict):
            todo += [((*path, key), inner) for key, inner in value.items()]
        elif isinstance(value, list):
            todo += [((*path, index), inner) for index, inner in enumerate(value)]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            message = f"`{dotted(path)}` does not fit into 64 bits"
        elif isinstance(value, datetime.date | datetime.time):
            message = f"`{dotted(path)}` is {kind_of(value)}, which no key of a recipe accepts"
            hint = f'if it is text, add quotes: {dotted(path[-1:])} = "{value}"'
        if message:
            yield Diagnostic(message, dotted(path), source.place(path), (hint,) if hint else ())


def _syntax_problem(source: Source, error: str) -> Diagnostic:
    where = _WHERE.search(error)  # before Python 3.14, tomllib reports the place only in its message
    message = f"not valid TOML: {printable(_WHERE.sub('', error))}"
    if where is None:
        return Diagnostic(message, place=SourceSpan(source.label))

    if where[1]:
        lines = source.text.split("\n")[: int(where[1]) - 1]
        start = sum(len(line) + 1 for line in lines) + int(where[2]) - 1
    else:
        start = len(source.text.rstrip())
        message += ", and the text ends here"
    place = source.at(start, start + 1)
    before = source.text.split("\n")[: max(0, place.line - 1)]
    return Diagnostic(message, place=place, hints=tuple(_syntax_hints(place.text, error, before)))


_INLINE = re.compile(r"\s*([\w.\"'-]+)\s*=\s*\{")  # an inline table, with its key
_STRINGS = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'")
_CLOSED = "is complete and cannot be extended: write [{0}] and a line for each of its keys"
_ONE_LINE = "an inline table stays on one line, and has no comma at its end: write [{0}] and a line for each key"


def _syntax_hints(line: str, error: str, before: Sequence[str]) -> Iterator[str]:
    """Yields ways to mend a line of TOML; `before` are the lines above it."""
    bare = re.fullmatch(r"\s*(\S+)\s*=\s*([^\s\"'\[{#][^#\"']*?)\s*(?:#.*)?", line)
    outside = _STRINGS.sub("", line)
    inline = _INLINE.match(line)
    if "Cannot overwrite" in error or "Cannot declare" in error or "Cannot mutate" in error or "Duplicate" in error:
        names = re.findall(r"[\w-]+", line.partition("=")[0])
        above = ((number, found[1]) for number, text in enumerate(before, 1) if (found := _INLINE.match(text)))
        closed = next(((number, key) for number, key in above if key.split(".") == names[: key.count(".") + 1]), None)
        if closed and len(names) > closed[1].count(".") + 1:
            yield f"the inline table `{closed[1]}` of line {closed[0]} {_CLOSED.format(closed[1])}"
        elif re.match(r"\s*\[", line) and any(re.match(r"\s*" + re.escape(line.strip()), one) for one in before):
            yield f"the table {line.strip()} is there twice: move the keys of both into one"
        elif re.match(r"\s*\[", line) and "overwrite" in error:
            yield "it is a value above, so it cannot be a table as well: keep one of the two"
        else:
            yield "it is set twice: keep one of the two"
    elif re.search("[\u201c\u201d\u201e\u2018\u2019\xab\xbb]", outside):  # curly and angled ones
        yield "TOML has straight quotes: \"text\" or 'text'"
    elif line.lstrip()[:1] == "{" and not "".join(before).strip():
        yield 'this looks like JSON; a recipe is TOML: write [train] and lines such as length = "5ep"'
    elif inline and (outside.count("{") > outside.count("}") or re.search(r",\s*\}", outside)):
        yield _ONE_LINE.format(inline[1])
    elif "\\" in line and re.search("escape|hex|unicode|backslash|Unescaped", error, re.IGNORECASE):
        yield "in double quotes a backslash begins an escape: write the text in single quotes, or a path with /"
    elif not bare and (number := re.search(r"(?<![\w.])[-+]?(\.\d+|\d+\.(?!\d))", outside)):
        yield f"a number needs digits on both sides of its point: {float(number[0])}"
    elif bare and (comment := re.search(r"\s+(//|--|;)\s", bare[2])):
        yield f"a comment begins with #: {bare[1]} = {bare[2][: comment.start()]}  # …"
    elif bare and (end := re.fullmatch(r"(.*?)\s*[;,]", bare[2])):
        yield f"a line has no {bare[2][-1]!r} at its end: {bare[1]} = {end[1]}"
    elif bare and bare[2][:1] in "=>:":
        yield f"TOML writes `key = value`: {bare[1]} = {bare[2].lstrip('=>: ')}"
    elif bare and re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", bare[2]):
        yield f"a number has no commas: {bare[1]} = {bare[2].replace(',', '_')}"
    elif bare and re.fullmatch(r"[-+]?0\d+", bare[2]):
        yield f"a number does not begin with 0: {bare[1]} = {int(bare[2])}"
    elif bare and (number := re.fullmatch(r"([-+]?)(\d*)\.(\d*)(e[-+]?\d+)", bare[2], re.IGNORECASE)):
        parts = f"{number[1]}{number[2] or 0}.{number[3] or 0}{number[4]}"
        yield f"a number needs digits on both sides of its point: {bare[1]} = {parts}"
    elif bare and re.fullmatch(r"[\d.\s()_]+([-+*/%][\d.\s()_]+)+", bare[2]):
        yield "TOML does not calculate: write the result"
    elif bare and bare[2] in _LOWER_CASE:
        yield f"write {bare[1]} = {_LOWER_CASE[bare[2]]}"
    elif bare and bare[2] in ("None", "null", "nil"):
        yield f"TOML has no `{bare[2]}`: remove the key"
    elif bare and re.fullmatch(r"[-+]?(\d+\.|\.\d+)", bare[2]):
        yield f"a number needs digits on both sides of its point: {bare[1]} = {float(bare[2])}"
    elif bare:
        yield f'text needs quotes: {bare[1]} = "{bare[2]}"'
    elif found := re.fullmatch(r"\s*\[+\s*([\w.\"-]+)\s*(\]*)\s*(.*)", line):
        after = ", and its keys on the lines below" if found[2] else ""
        yield f"a header is alone on its line, with its closing bracket: [{found[1].strip(chr(34))}]{after}"
    elif re.match(r"\s*[\w.-]+\s*=\s*[rRfFbBuU]+[\"']", line):
        yield "text has no letter before its quotes: \"text\" or 'text'"
    elif re.match(r"\s*[\w.-]+\s*=\s*(\"[^\"]*\"|'[^']*')\s*\S", line):
        yield "after a text the line ends; a comment begins with #"
    elif re.match(r"\s*[\w.-]+\s*=\s*\[[^\]]*[\"'\d]\s+[\"'\d]", line):
        yield "the elements of an array are separated by commas"
    elif "Expected '='" in error and ":" not in line and re.match(r"\s*\w", line):
        yield "a line is `key = value`; a key has letters, digits, `_` and `-`, and no spaces"
    elif re.match(r"\s*[\w-]+\s*:", line):
        yield "TOML writes `key = value`, not `key: value`"
    elif re.fullmatch(r"\s*[\w.-]+\s*=\s*(#.*)?", line):
        yield "a value is missing after `=`"
    elif "Illegal character '\\n'" in error or "Unterminated string" in error or 'Expected "\'"' in error:
        yield "a string must end on the same line: is its closing quote missing?"
    elif "end of document" in error or "Unclosed" in error:
        yield "is a closing bracket or quote missing?"


def toml_value(value: object) -> str:
    """Returns a number, a boolean, a text, or a list or mapping of them, as TOML on one line."""
    import tomlkit
    from tomlkit.items import InlineTable, Item

    def item(one: object) -> Item:
        if not isinstance(one, dict):
            return tomlkit.item(one)
        table: InlineTable = tomlkit.inline_table()
        for key, inner in one.items():
            table[key] = item(inner)
        return table

    return item(value).as_string()
