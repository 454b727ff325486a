"""Names of recipe version 1 and their names in version 2, and dropped names, as `renamed.toml` lists them."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from ddpforge.recipe.layers import find, kind_at
from ddpforge.recipe.report import KeyPath, dotted
from ddpforge.recipe.toml import Table, Value

_OWN = "ddpforge:"  # before the name of a component of ours, if several packages register that name

UseOf = Callable[[KeyPath], str | None]
"""Finds the `use` of the component at this path of version 2; None if it is not known."""


@dataclass(frozen=True)
class Renamed:
    """A key or an option with its old and new name; `values` are those of its values that are renamed."""

    old: KeyPath  # "*" is any name; of an option: its path within the component's table
    new: KeyPath
    values: Mapping[str, Value] = field(default_factory=dict)
    component: str = ""  # the kind of component that a string names here
    kind: str = ""  # of the component whose option it is
    of: tuple[str, ...] = ()  # the components that have it, by their new names

    @property
    def changes_type(self) -> bool:
        """True if only the values in `values` have a counterpart."""
        return any(not isinstance(value, str) for value in self.values.values())

    def value(self, old: Value) -> Value:
        """Returns the new value; raises KeyError if `old` has none."""
        if self.component and isinstance(old, str):
            return new_component(self.component, old)
        if not self.values:
            return old
        if not isinstance(old, str):
            if self.changes_type:
                raise KeyError(old)
            return old
        word, colon, rest = old.partition(":")
        if word in self.values and isinstance(self.values[word], str):
            return f"{self.values[word]}{colon}{rest}"
        if old in self.values or self.changes_type or "${" in old:
            return self.values[old]
        return old


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("renamed.toml").read_text(encoding="utf-8"))


@cache
def keys() -> list[Renamed]:
    """Returns the keys of ddpforge's own tables."""
    return [_renamed(row) for row in _table()["keys"]]


@cache
def options() -> list[Renamed]:
    """Returns the options of components."""
    return [_renamed(row) for row in _table()["options"]]


def _renamed(row: Mapping[str, Any]) -> Renamed:
    old, new = (tuple(row[name].split(".")) for name in ("old", "new"))
    return Renamed(
        old, new, row.get("values", {}), row.get("component", ""), row.get("kind", ""), tuple(row.get("of", ()))
    )


@cache
def components() -> dict[tuple[str, str], str]:
    """Returns the new names of components, by kind and old name."""
    return {(row["kind"], row["old"]): row["new"] for row in _table()["components"]}


@cache
def earlier_defaults() -> dict[str, dict[str, Value]]:
    """Returns by component the options that have another default since version 2, each with the one before."""
    return {name: {row["option"]: row["before"]} for row in _table()["defaults"] for name in row["of"]}


def new_component(kind: str | None, use: str) -> str:
    """Returns the new name of a component that `use` names; without a `kind`, of any kind."""
    own = _OWN if use.startswith(_OWN) else ""
    name = use.removeprefix(_OWN)
    found = {new for (known, old), new in components().items() if old == name and kind in (None, known)}
    return own + found.pop() if found else use


# ---------------------------------------------------------------------------------------------- dropped
def _dropped(path: KeyPath, use: object) -> dict[str, Any] | None:
    """Returns the row for a key, or for an option of the component `use`; None if nothing of it was dropped."""
    own = use.removeprefix(_OWN) if isinstance(use, str) else None
    rows = (row for row in _table()["dropped"] if (own in row["of"] if "of" in row else use is None))
    return next((row for row in rows if row["key"] == (path[-1] if "of" in row else dotted(path))), None)


def why_dropped(path: KeyPath, use: object, value: object = None) -> list[str]:
    """Returns a hint if a version has dropped this key, or this `value` of it; else nothing."""
    row = _dropped(path, use)
    if row is None or (value not in row["values"] if "values" in row else value is not None):
        return []
    what = f'"{value}"' if "values" in row else f"`{path[-1]}`"
    return [f"{what} was dropped in {row['since']}: {row['instead']}"]


def without_dropped(table: Table, path: KeyPath, use: object) -> Table:
    """Returns the table of the component `use` without dropped options that have their default."""

    def is_default(key: str, value: Value) -> bool:
        row = _dropped((*path, key), use)
        return row is not None and "default" in row and row["default"] == value

    return {key: value for key, value in table.items() if not is_default(key, value)}


# ---------------------------------------------------------------------------------------------- of one recipe
def options_of(kind: str | None, use: str | None) -> list[Renamed]:
    """Returns the renamed options of a component; if its name is not known, of all components of the kind."""
    if use is None:
        return [row for row in options() if row.kind == kind]
    name = new_component(kind, use).removeprefix(_OWN)
    return [row for row in options() if name in row.of and kind in (None, row.kind)]


class Names:
    """Old and new names of a recipe with these `tables`, in the layout of version 1 or 2."""

    def __init__(self, tables: Table, use_of: UseOf) -> None:
        self._tables = tables
        self._use_of = use_of

    def path(self, old: KeyPath) -> KeyPath:
        """Returns the path that `old` has in version 2."""
        new: KeyPath = ()
        for end in range(1, len(old) + 1):
            row = self.row(old[:end], new)
            new = (*new, row.new[-1] if row and row.new[-1] != "*" else old[end - 1])
        return new

    def value(self, old: KeyPath, value: Value) -> Value:
        """Returns the new value of the key at the old path; raises KeyError if it has none in version 2."""
        new = self.path(old)
        if old[-1] == "use" and isinstance(value, str):
            found, kind, _ = self._component(old[:-1], new[:-1])
            return new_component(kind, value) if found else value
        row = self.row(old, new[:-1])
        return row.value(value) if row else value

    def row(self, old: KeyPath, table: KeyPath) -> Renamed | None:
        """Returns the row for the last part of `old`; `table` is the new path of the table around it."""
        known = (row for row in keys() if row.new[:-1] and _matches(row.new[:-1], table) and row.old[-1] == old[-1])
        if row := next(known, None):
            return row
        for start in range(len(old) - 1, 0, -1):
            found, kind, use = self._component(old[:start], table[:start])
            if found:
                rows = options_of(kind, use)
                return next((row for row in rows if _matches(row.old, old[start:])), None)
        return None

    def _component(self, old: KeyPath, new: KeyPath) -> tuple[bool, str | None, str | None]:
        """True if the table is a component's; its kind; and its `use`, each None if that is not known."""
        kind = kind_at(new, self._tables)
        table = find(self._tables, old)
        own = table.get("use") if isinstance(table, dict) else None
        use = own if isinstance(own, str) else None
        if kind is None:  # one within the options of another has a `use` of its own, and may be of any kind
            inner = use is not None and any(kind_at(new[:end], self._tables) for end in range(1, len(new)))
            return inner, None, use
        use = use or self._use_of(new)
        return True, kind, None if use and "${" in use else use


def _matches(pattern: KeyPath, path: KeyPath) -> bool:
    return len(pattern) == len(path) and all(
        one == "*" or one == other for one, other in zip(pattern, path, strict=True)
    )


# ---------------------------------------------------------------------------------------------- for errors
def now_called(
    path: KeyPath, value: Value, tables: Table, use_of: UseOf
) -> tuple[str, KeyPath, tuple[str, ...]] | None:
    """Returns the message, the new path and hints for an unknown key of a recipe of version 2; None if it is none."""
    names = Names(tables, use_of)
    new = names.path(path)
    row = names.row(path, new[:-1])
    if row is None or new[:-1] != path[:-1] or new == path:
        return None
    try:
        changed = names.value(path, value)
    except KeyError:
        changed = value
    section = isinstance(value, dict) and not row.of
    said = f"[{dotted(path)}] is now [{dotted(new)}]" if section else f"`{path[-1]}` is now `{new[-1]}`"
    return said, new, () if changed == value else (f"write {new[-1]} = {_written(changed)}",)


def renamed_value(path: KeyPath, value: object) -> str | None:
    """Returns the new name of a value that the key at the new `path` had in version 1; None if it had none such."""
    row = next((row for row in keys() if row.new == path), None)
    new = row.values.get(value) if row and isinstance(value, str) else None
    return new if isinstance(new, str) and new != value else None


def _written(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def renamed_plan_word(text: str) -> Iterator[str]:
    """Yields a hint for a style of a tensor plan that has another name in version 2."""
    row = next(row for row in options() if row.old == ("plan", "*"))
    if (new := row.value(text.replace("${", ""))) != text:
        yield f"`{text}` is now `{new}`"
