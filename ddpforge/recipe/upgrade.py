"""Upgrades the text of a recipe of version 1 to version 2: renames words, writes defaults of before, keeps the rest."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddpforge import disk
from ddpforge.errors import Diagnostic, RecipeError, SourceSpan
from ddpforge.recipe.bundled import bundled
from ddpforge.recipe.layers import NAMED_SLOTS, find
from ddpforge.recipe.renamed import Names, earlier_defaults, without_dropped
from ddpforge.recipe.report import KeyPath, dotted, shown
from ddpforge.recipe.schema import VERSION, Recipe
from ddpforge.recipe.toml import Source, Table, Value, loads, parse, read, toml_value

__all__ = [
    "RESOLVED",
    "Rename",
    "Upgraded",
    "is_old",
    "upgrade_file",
    "upgrade_tables",
    "upgrade_text",
    "upgraded_or_same",
]

RESOLVED = "recipe.resolved.toml"
"""The name of the recipe with every default, in a run's folder; one of version 1 is upgraded when it is read."""

_SECTIONS = {*Recipe.model_fields, "extends", "unset", "vars"}
_DEEPEST = 8  # files that extend each other
_QUOTED = re.compile(r"(\"\"\"|'''|[\"'])(.*)\1", re.DOTALL)


@dataclass(frozen=True)
class Rename:
    """Change of a line of a recipe: the name before and after."""

    line: int
    old: str
    new: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.old} → {self.new}"


@dataclass(frozen=True)
class Upgraded:
    """The text of a recipe in version 2, and the changes that made it; none if it has been of version 2 before."""

    text: str
    changes: tuple[Rename, ...] = ()


def is_old(tables: Table) -> bool:
    """True if a recipe has `recipe = 1`."""
    return type(tables.get("recipe")) is int and tables["recipe"] == 1


def upgrade_tables(text: str) -> Table:
    """Returns the tables of a resolved recipe, upgraded if it is of version 1; raises ValueError for other text.

    A recipe that cannot be upgraded, which no version of ddpforge writes, keeps its names.
    """
    tables = loads(text)
    tables = loads(upgraded_or_same(Source(RESOLVED, text))) if is_old(tables) else tables
    if isinstance(strategy := tables.get("strategy"), dict):
        tables["strategy"] = without_dropped(strategy, ("strategy",), strategy.get("use"))
    return tables


def upgraded_or_same(source: Source) -> str:
    """Returns the text of a resolved recipe in version 2, or as it is if it cannot be upgraded."""
    try:
        return upgrade_text(source).text
    except RecipeError:
        return source.text


def upgrade_file(path: Path, *, check: bool = False) -> Upgraded:
    """Upgrades a file in place, in one instant; with `check` nothing is written.

    Raises RecipeError for a file that cannot be read, is not a recipe, or has no counterpart in version 2.
    """
    label = str(path)
    if not path.is_file():
        raise RecipeError([Diagnostic(f"{'not a file' if path.exists() else 'no such file'}: `{label}`")])
    found = upgrade_text(read(path, label))
    if found.changes and not check:
        original = path.read_bytes().decode("utf-8")
        _replace(path.resolve(), _with_line_ends(found.text, original).encode("utf-8"))
    return found


def _with_line_ends(text: str, original: str) -> str:
    """`text`, with the byte order mark and the ends of lines that `original` has."""
    lines, before = text.split("\n"), original.removeprefix("\ufeff").split("\n")
    mark = "\ufeff" if original.startswith("\ufeff") else ""
    ended = [line + "\r" * old.endswith("\r") for line, old in zip(lines, before, strict=True)]
    return mark + "\n".join(ended)


def _replace(path: Path, data: bytes) -> None:
    """Replaces the contents of a file atomically, and keeps its mode; raises RecipeError if that fails."""
    mode = path.stat().st_mode
    try:
        disk.replace(path, data)
        path.chmod(mode)
    except OSError as error:
        with suppress(OSError):
            disk.remove(path.with_name(f".{path.name}.tmp"))
        raise RecipeError([Diagnostic(f"cannot write `{path}`: {error.strerror}")]) from error


def upgrade_text(source: Source, seen: tuple[Path, ...] = ()) -> Upgraded:
    """Returns the text in version 2; raises as `upgrade_file` does. `seen` are the files that extend this one."""
    tables = parse(source)
    _refuse_others(source, tables)
    if tables.get("recipe") == VERSION:
        return Upgraded(source.text)
    upgrade = _Upgrade(source, tables, seen)
    upgrade.keys()
    upgrade.values()
    upgrade.defaults()
    if upgrade.problems:
        raise RecipeError(upgrade.problems)
    return upgrade.result()


def _refuse_others(source: Source, tables: Table) -> None:
    """Raises RecipeError for a file that is neither a recipe nor a part of one."""
    version = tables.get("recipe")
    if "recipe" in tables and (type(version) is not int or version not in (1, VERSION)):
        message = f"`recipe` must be 1 or {VERSION}, not {shown(version)}"
        raise RecipeError([Diagnostic(message, "recipe", source.place(("recipe",)))])
    if "recipe" not in tables and (not tables or not tables.keys() <= _SECTIONS):
        hint = "a recipe begins with the line `recipe = 1`; a file that one extends has no other sections than a recipe"
        place = SourceSpan(source.label)
        raise RecipeError([Diagnostic(f"`{source.label}` is not a recipe", place=place, hints=(hint,))])


class _Upgrade:
    """The edits of one text."""

    def __init__(self, source: Source, tables: Table, seen: tuple[Path, ...]) -> None:
        self.source = source
        self._seen = seen
        self.tables = tables
        self.problems: list[Diagnostic] = []
        self._edits: dict[tuple[int, int], str] = {}
        self._changes: list[Rename] = []
        self._bases: list[Table] | None = None
        self._names = Names(tables, self._use)

    def result(self) -> Upgraded:
        text = self.source.text
        for (start, end), new in sorted(self._edits.items(), reverse=True):
            text = text[:start] + new + text[end:]
        return Upgraded(text, tuple(sorted(self._changes, key=lambda change: change.line)))

    # -- keys
    def keys(self) -> None:
        """Renames each part of each key; a table's name as often as it is written."""
        said: set[KeyPath] = set()
        for path, start, end in self.source.parts():
            new = self._names.path(path)
            if new[-1] == path[-1]:
                continue
            if path not in said and find(self.tables, (*path[:-1], new[-1])) is not None:
                message = f"`{dotted(path)}` is now `{dotted(new)}`, and both are written"
                self._problem(path, message, "keep one of the two", key=True)
            said.add(path)
            self._edits[start, end] = _like(self.source.text[start:end], str(new[-1]))
            self._note(start, dotted(path), dotted(new))

    # -- values
    def values(self) -> None:
        """Renames what values name: words, components, and the keys in `unset`."""
        if "recipe" in self.tables:
            start, end = self.source.value(("recipe",))
            self._edits[start, end] = str(VERSION)
            self._note(start, "recipe = 1", f"recipe = {VERSION}")
        for path, value in _leaves(self.tables):
            if path[0] == "unset" and isinstance(value, str):
                self._edit_value(path, value, self._unset(value))
            elif path[0] not in ("extends", "unset", "vars", "recipe"):
                self._value(path, value)

    def _value(self, path: KeyPath, value: Value) -> None:
        try:
            self._edit_value(path, value, self._names.value(path, value))
        except KeyError:
            new = self._names.path(path)
            hint = f"write `{dotted(new[-1:])}` and its value yourself, as docs/extend/upgrade.md has them"
            self._problem(path, f"`{dotted(path)}` is now `{dotted(new)}`, and {shown(value)} has no counterpart", hint)

    def _edit_value(self, path: KeyPath, old: Value, new: Value) -> None:
        if type(new) is type(old) and new == old:
            return
        start, end = self.source.value(path)
        written = self.source.text[start:end]
        self._edits[start, end] = _like(written, new) if isinstance(new, str) else toml_value(new)
        names = dotted(path), dotted(self._names.path(path))
        self._changes = [change for change in self._changes if (change.old, change.new) != names]
        self._note(start, f"{dotted(path)} = {shown(old)}", f"{dotted(self._names.path(path))} = {shown(new)}")

    def _unset(self, text: str) -> str:
        try:
            table: Value = tomllib.loads(f"{text} = 0")
        except (ValueError, RecursionError):
            return text
        path: KeyPath = ()
        while isinstance(table, dict):
            ((key, table),) = table.items()
            path = (*path, key)
        new = self._names.path(path)
        return text if new == path else dotted(new)

    # -- defaults
    def defaults(self) -> None:
        """Writes the default before of each option that has another one now, in front of the component's `use`."""
        starts = {path: start for path, start, _ in self.source.parts() if path[-1] == "use"}
        for path, start in starts.items():
            use = find(self.tables, path)
            if path[0] == "vars" or not isinstance(use, str):
                continue
            for option, before in earlier_defaults().get(use.rpartition(":")[2], {}).items():
                if find(self.tables, (*path[:-1], option)) is None:
                    name = dotted((*path[:-1], option))
                    self._insert(start, f"{option} = {toml_value(before)}")
                    self._note(start, f"{name}, which is absent", f"{name} = {toml_value(before)}")

    def _insert(self, start: int, text: str) -> None:
        """Inserts a key with its value before the key at `start`, into the same table."""
        head = self.source.text[self.source.text.rfind("\n", 0, start) + 1 : start]
        if "{" in head:  # an inline table; `head` may have the first part of a dotted key
            self._edits[start, start] = f"{text}, {re.split('[{,]', head)[-1].strip()}"
        else:
            self._edits[start, start] = f"{text}\n{head}"

    # -- components
    def _use(self, path: KeyPath) -> str | None:
        """Returns the `use` of the component at the new `path`: of an extended file, or its table's name."""
        if self._bases is None:
            self._bases = list(_bases(self.tables, self.source.folder, self._seen))
        for base in self._bases:
            if isinstance(found := find(base, (*path, "use")), str):
                return found
        return str(path[-1]) if path[0] in NAMED_SLOTS else None

    # -- reports
    def _note(self, start: int, old: str, new: str) -> None:
        self._changes.append(Rename(self.source.text.count("\n", 0, start) + 1, old, new))

    def _problem(self, path: KeyPath, message: str, hint: str, *, key: bool = False) -> None:
        self.problems.append(Diagnostic(message, dotted(path), self.source.place(path, key=key), (hint,)))


def _bases(tables: Table, folder: Path, seen: tuple[Path, ...]) -> Iterator[Table]:
    """Yields the tables of the files that a recipe extends, in version 2; the one that wins comes first.

    A file that cannot be read or upgraded is skipped: it is reported when it is upgraded itself, or loaded.
    """
    extends = tables.get("extends", [])
    for name in reversed(extends if isinstance(extends, list) else [extends]):
        path = folder / str(name)
        path = path if os.path.isfile(path) else bundled().get(str(name), path)
        if (place := path.resolve()) in seen or len(seen) >= _DEEPEST:
            continue
        try:
            base = parse(Source(str(path), upgrade_text(read(path, str(path)), (*seen, place)).text))
        except RecipeError:
            continue
        yield base
        yield from _bases(base, path.parent, (*seen, place))


def _leaves(value: Value, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Value]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path, value
        return
    for key, one in inner:
        yield from _leaves(one, (*path, key))


def _like(written: str, new: str) -> str:
    """`new` between the quotes that `written` has."""
    quoted = _QUOTED.fullmatch(written)
    return f"{quoted[1]}{new}{quoted[1]}" if quoted else new
