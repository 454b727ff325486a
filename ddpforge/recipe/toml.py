"""Reads and parses TOML: the standard library's parser, with errors that show the place and a way out."""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from ddpforge.errors import Place, Problem, RecipeError
from ddpforge.recipe.layers import Table
from ddpforge.recipe.origins import KeyPath, Source
from ddpforge.recipe.report import dotted, kind_of, printable

_DEEPEST = 16
_MOST = 4 << 20  # characters
# tomllib takes time with the square of a key's parts. Looked for where a part begins, and never twice: a hundred
# thousand digits would take minutes.
_TOO_DOTTED = re.compile(
    rf"""(?<![A-Za-z0-9_-])(?:(?:[A-Za-z0-9_-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*+){{{4 * _DEEPEST}}}"""
)
_TOO_DEEP = re.compile(rf"(?:[\[{{][^\[\]{{}}]*){{{_DEEPEST + 1}}}")  # brackets opened and not closed
_WHERE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)")
_LOWER_CASE = {"True": "true", "False": "false", "yes": "true", "no": "false", "on": "true", "off": "false"}


def read(path: Path, label: str) -> Source:
    """The text of the file `path`. Raises RecipeError when it cannot be read or is not UTF-8."""
    try:
        with path.open("rb") as file:
            data = file.read(4 * _MOST + 1)  # of a device, say, there is no end
    except OSError as error:
        raise RecipeError([Problem(f"cannot read `{label}`: {error.strerror}", place=Place(label))]) from error

    folder = path.absolute().parent
    try:
        return Source(label, data.decode("utf-8-sig").replace("\r\n", "\n"), folder)
    except UnicodeDecodeError as error:
        source = Source(label, data.decode("utf-8", "replace"), folder)
        start = source.text.index("\ufffd", len(data[: error.start].decode()))
        problem = Problem(
            f"not UTF-8 text: byte 0x{data[error.start]:02x}",
            place=source.at(start, start + 1),
            hints=("save the file as UTF-8",),
        )
        raise RecipeError([problem]) from error


def loads(text: str) -> Table:
    """The tables of a text that may be anything; raises ValueError for what is no TOML, or beyond all measure."""
    if len(text) > _MOST:
        raise ValueError(f"it has {len(text):,} characters, more than any recipe")
    if _TOO_DOTTED.search(text):
        raise ValueError("a key in it has more parts than any recipe's")
    try:
        return tomllib.loads(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def parse(source: Source) -> Table:
    """The tables of one text. Raises RecipeError for bad syntax and for values that no recipe can hold."""
    if len(source.text) > _MOST:
        raise RecipeError(
            [Problem(f"too long for a recipe: {len(source.text):,} characters", place=Place(source.label))]
        )
    if dotted_key := _TOO_DOTTED.search(source.text):
        place = source.at(*dotted_key.span())
        raise RecipeError([Problem(f"nested too deeply: at most {_DEEPEST} levels", place=place)])
    try:
        table = tomllib.loads(source.text)
    except RecursionError as error:
        opened = _TOO_DEEP.search(source.text)
        place = source.at(*opened.span()) if opened else Place(source.label)
        raise RecipeError([Problem(f"nested too deeply: at most {_DEEPEST} levels", place=place)]) from error
    except ValueError as error:  # besides TOMLDecodeError, an integer of thousands of digits
        raise RecipeError([_syntax_problem(source, str(error))]) from error

    if problems := list(_unusable(table, source)):
        raise RecipeError(problems)
    return table


def _unusable(table: Table, source: Source) -> Iterator[Problem]:
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
            message = f"`{dotted(path)}` is {kind_of(value)}, which no part of a recipe takes"
            hint = f'if it is text, add quotes: {dotted(path[-1:])} = "{value}"'
        if message:
            yield Problem(message, dotted(path), source.place(path), (hint,) if hint else ())


def _syntax_problem(source: Source, error: str) -> Problem:
    where = _WHERE.search(error)  # tomllib tells the place in words only, before Python 3.14
    message = f"not valid TOML: {printable(_WHERE.sub('', error))}"
    if where is None:
        return Problem(message, place=Place(source.label))

    if where[1]:
        lines = source.text.split("\n")[: int(where[1]) - 1]
        start = sum(len(line) + 1 for line in lines) + int(where[2]) - 1
    else:
        start = len(source.text.rstrip())
        message += ", and the text ends here"
    place = source.at(start, start + 1)
    return Problem(message, place=place, hints=tuple(_syntax_hints(place.text, error)))


def _syntax_hints(line: str, error: str) -> Iterator[str]:
    bare = re.fullmatch(r"\s*(\S+)\s*=\s*([^\s\"'\[{#][^#\"']*?)\s*(?:#.*)?", line)
    if "Cannot overwrite" in error or "Cannot declare" in error or "Duplicate" in error:
        yield "it is set twice: keep one of the two"
    elif bare and bare[2] in _LOWER_CASE:
        yield f"write {bare[1]} = {_LOWER_CASE[bare[2]]}"
    elif bare and bare[2] in ("None", "null", "nil"):
        yield f"TOML has no `{bare[2]}`: leave the key out"
    elif bare and re.fullmatch(r"[-+]?(\d+\.|\.\d+)", bare[2]):
        yield f"a number needs digits on both sides of its point: {bare[1]} = {float(bare[2])}"
    elif bare:
        yield f'text needs quotes: {bare[1]} = "{bare[2]}"'
    elif re.match(r"\s*[\w-]+\s*:", line):
        yield "TOML writes `key = value`, not `key: value`"
    elif re.fullmatch(r"\s*[\w.-]+\s*=\s*(#.*)?", line):
        yield "a value is missing after `=`"
    elif "Illegal character '\\n'" in error or "Unterminated string" in error or 'Expected "\'"' in error:
        yield "a string ends on the line it began on: is its closing quote missing?"
    elif "end of document" in error or "Unclosed" in error:
        yield "is a closing bracket or quote missing?"
