"""The tables of a recipe while they are put together, and where each of their values was written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from ddpforge.recipe.origins import KeyPath, Origin, Source

Table = dict[str, Any]

SLOTS: dict[KeyPath, str] = {
    ("model",): "model",
    ("data", "train"): "data",
    ("data", "eval"): "data",
    ("task",): "task",
    ("optimizer",): "optimizer",
    ("schedule",): "schedule",
    ("strategy",): "strategy",
}
"""The tables that name a component, and its kind."""

NAMED_SLOTS = {"track": "tracker", "callbacks": "callback"}
"""The tables whose inner tables name components; there the key is the default for `use`."""

FRAMEWORK_KEYS: dict[KeyPath, tuple[str, ...]] = {("optimizer",): ("no_decay",)}
"""Keys of a component's table that ddpforge itself reads; all others but `use` are the component's options."""

_VARIABLE = re.compile(r"\$\{vars\.([^{}]*)\}")


def kind_at(path: KeyPath) -> str | None:
    """The kind of component whose table is at `path`, e.g. "tracker" for ("track", "wandb")."""
    if len(path) == 2 and path[0] in NAMED_SLOTS:
        return NAMED_SLOTS[str(path[0])]
    return SLOTS.get(path)


def used_name(path: KeyPath, table: Table) -> Any:
    """What the component's table at `path` says or implies for `use`; None where it says nothing."""
    return table.get("use", path[-1] if path[0] in NAMED_SLOTS else None)


class Layers:
    """Tables laid over one another, the origin of each key, and the variables that any layer refers to."""

    def __init__(self) -> None:
        self.tables: Table = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.variables: set[str] = set()        # also those in values that a later layer replaced

    @classmethod
    def of(cls, table: Table, source: Source) -> Layers:
        """The single layer that one source makes."""
        layer = cls()
        layer.tables = table
        layer.origins = {path: Origin(source, path) for path in _keys(table)}
        layer.variables = {name for _, text in strings(table) for name in _VARIABLE.findall(text)}
        return layer

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at `path` was written; for an array's element or an absent key, relative to what is around it."""
        for end in range(len(path), 0, -1):
            if found := self.origins.get(path[:end]):
                return Origin(found.source, (*found.path, *path[end:]), found.through)
        return Origin()

    def merge(self, other: Layers, *, change_use: bool = True) -> None:
        """Lays `other` on top: tables merge, everything else is replaced.

        A component's table that names another component than before loses the old one's options, if `change_use`.
        """
        self._merge(self.tables, other.tables, (), other.origins, change_use)
        self.variables |= other.variables

    def _merge(
        self, mine: Table, theirs: Table, at: KeyPath, origins: dict[KeyPath, Origin], change_use: bool
    ) -> None:
        for key, value in theirs.items():
            path = (*at, key)
            old = mine.get(key)
            if isinstance(value, dict) and isinstance(old, dict):
                if change_use and "use" in value and kind_at(path) and used_name(path, old) not in (None, value["use"]):
                    for option in old.keys() - FRAMEWORK_KEYS.get(path, ()):
                        self._forget(old, option, (*path, option))
                self._merge(old, value, path, origins, change_use)
            else:
                self._forget(mine, key, path)
                mine[key] = value
                self.origins |= _below(origins, path)
            self.origins[path] = origins[path]

    def _forget(self, table: Table, key: str, path: KeyPath) -> None:
        if key in table:
            del table[key]
            for gone in _below(self.origins, path):
                del self.origins[gone]


def strings(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Every string in `value`, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from strings(inner, (*path, index))


def _keys(table: Table, at: KeyPath = ()) -> Iterator[KeyPath]:
    for key, value in table.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from _keys(value, (*at, key))


def _below(origins: dict[KeyPath, Origin], path: KeyPath) -> dict[KeyPath, Origin]:
    return {one: origin for one, origin in origins.items() if one[: len(path)] == path}
