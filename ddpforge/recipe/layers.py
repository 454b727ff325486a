"""Tables of a recipe during composition, with the origin of each value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from ddpforge.components.kinds import KINDS
from ddpforge.recipe.report import KeyPath
from ddpforge.recipe.schema import Component, GroupComponent, SourceComponent, UpdateComponent
from ddpforge.recipe.toml import Origin, Source, Table, Value

SLOTS: dict[KeyPath, str] = {path: kind for kind, spec in KINDS.items() for path in spec.tables}
"""Tables that name a component, and its kind."""

NAMED_SLOTS = {spec.named_in: kind for kind, spec in KINDS.items() if spec.named_in}
"""Tables with inner tables that name components. The key of an inner table is its default for `use`."""

SOURCES = ("data", "train")
SETS = (SOURCES, ("data", "eval"))
"""Tables that name a component; without `use` they may hold several named tables that do."""

VARIATIONS: dict[tuple[str, ...], type[Component]] = {
    ("optimizer", "groups"): GroupComponent,
    ("optimizer", "updates"): UpdateComponent,
}
"""Tables with inner tables that vary the table around them and inherit its keys; with their schemas."""

SCHEDULES = ("optimizer", "schedules")
"""Table with inner tables that name schedules of the optimizer's options, by the option."""

_VARIABLE = re.compile(r"\$\{vars\.([^{}]*)\}")


def kind_at(path: KeyPath, tables: Table) -> str | None:
    """Returns the kind of component at `path` of `tables`, e.g. "tracker" for ("track", "wandb"), or None."""
    if len(path) == 2 and path[0] in NAMED_SLOTS:
        return NAMED_SLOTS[str(path[0])]
    if path[:2] in SETS and holds_sets(tables, path[:2]):
        return SLOTS[path[:2]] if len(path) == 3 else None
    if path[:2] == SCHEDULES:
        return "schedule" if len(path) == 3 else None
    if path[:2] in VARIATIONS and len(path) > 2:
        inner = path[3:]
        return "schedule" if inner == ("schedule",) else None if inner else "optimizer"
    return SLOTS.get(path)


def framework_keys(path: KeyPath) -> tuple[str, ...]:
    """Returns the keys of a component's table that ddpforge itself reads; other keys except `use` are its options."""
    if path in SLOTS:
        return KINDS[SLOTS[path]].framework_keys
    if path[:-1] == SOURCES:
        varied: type[Component] = SourceComponent
    else:
        varied = next((model for table, model in VARIATIONS.items() if table == path[:-1]), Component)
    return tuple(key for key in varied.model_fields if key not in Component.model_fields)


def holds_sets(tables: Table, sets: KeyPath) -> bool:
    """True if [data.train] or [data.eval] holds several components; False if it has `use`: then it is one itself."""
    table = find(tables, sets)
    if not isinstance(table, dict) or "use" in table:
        return False
    inner = [value for value in table.values() if isinstance(value, dict)]
    return any("use" in value for value in inner) or 0 < len(inner) == len(table)


def used_name(path: KeyPath, table: Table) -> Value:
    """Returns the explicit or implied `use` of the component's table at `path`; None if there is none."""
    return table.get("use", path[-1] if path[0] in NAMED_SLOTS else None)


class Layers:
    """Merged tables, the origin of each key, and the variables that any layer refers to."""

    def __init__(self) -> None:
        self.tables: Table = {}
        self.origins: dict[KeyPath, Origin] = {}
        self.variables: set[str] = set()  # also from values that a later layer replaced
        self.dropped: dict[KeyPath, tuple[Value, Value]] = {}  # options removed with a component: value, component

    @classmethod
    def of(cls, table: Table, source: Source) -> Layers:
        """Builds a single layer from one source."""
        layer = cls()
        layer.tables = table
        layer.origins = {path: Origin(source, path) for path in paths(table)}
        layer.variables = {name for _, text in strings(table) for name in _VARIABLE.findall(text)}
        return layer

    def origin(self, path: KeyPath) -> Origin:
        """Returns the origin of the value at `path`; if it has none, that of the table around it."""
        for end in range(len(path), 0, -1):
            if found := self.origins.get(path[:end]):
                return Origin(found.source, (*found.path, *path[end:]), found.through)
        return Origin()

    def merge(self, other: Layers, *, change_use: bool = True) -> None:
        """Merges `other` on top: tables are merged, other values replaced.

        If `change_use`, a table that now names another component loses the options of the old one.
        """
        self._merge(self.tables, other.tables, (), other.origins, change_use)
        self.variables |= other.variables

    def unset(self, path: KeyPath) -> bool:
        """Removes a key or a table; returns False if there is none."""
        table: Value = self.tables
        for key in path[:-1]:
            table = table.get(key) if isinstance(table, dict) else None
        if not isinstance(table, dict) or path[-1] not in table:
            return False
        self._forget(table, str(path[-1]), path)
        return True

    def _merge(self, mine: Table, theirs: Table, at: KeyPath, origins: dict[KeyPath, Origin], change_use: bool) -> None:
        for key, value in theirs.items():
            path = (*at, key)
            old = mine.get(key)
            if isinstance(value, dict) and isinstance(old, dict):
                if change_use and _names_another(path, old, value, self.tables):
                    uses = used_name(path, old)
                    for option in old.keys() - framework_keys(path):
                        self.dropped[(*path, option)] = old[option], uses
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


def _names_another(path: KeyPath, old: Table, new: Table, tables: Table) -> bool:
    """True if `new` names another component than `old`."""
    return kind_at(path, tables) is not None and "use" in new and used_name(path, old) not in (None, new["use"])


def inside(table: Value, path: KeyPath) -> Value:
    """Returns the value at `path` in `table`."""
    for key in path:
        table = table[key]
    return table


def find(table: Value, path: KeyPath) -> Value:
    """Returns the value at `path` in `table`, or None if there is none: TOML has no null."""
    try:
        return inside(table, path)
    except (KeyError, IndexError, TypeError):
        return None


def strings(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yields every string in `value`, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from strings(inner, (*path, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from strings(inner, (*path, index))


def map_strings(value: Value, change: Callable[[KeyPath, str], Value], path: KeyPath = ()) -> Value:
    """Returns a copy of `value` in which `change(path, text)` replaces every string."""
    if isinstance(value, str):
        return change(path, value)
    if isinstance(value, dict):
        return {key: map_strings(inner, change, (*path, key)) for key, inner in value.items()}
    if isinstance(value, list):
        return [map_strings(inner, change, (*path, index)) for index, inner in enumerate(value)]
    return value


def paths(table: Table, at: KeyPath = ()) -> Iterator[KeyPath]:
    """Yields the path of every key of `table` and of the tables in it."""
    for key, value in table.items():
        yield (*at, key)
        if isinstance(value, dict):
            yield from paths(value, (*at, key))


def _below(origins: dict[KeyPath, Origin], path: KeyPath) -> dict[KeyPath, Origin]:
    return {one: origin for one, origin in origins.items() if one[: len(path)] == path}
