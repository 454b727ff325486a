"""The keys that one recipe may have, and where: the schemas of its sections, and of the components it uses."""

from __future__ import annotations

from typing import get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.layers import framework_keys
from ddpforge.recipe.origins import KeyPath
from ddpforge.recipe.other_tools import FOREIGN_KEYS, FOREIGN_SECTIONS
from ddpforge.recipe.report import dotted, nearest
from ddpforge.recipe.schema import (
    CheckpointSection,
    DataSection,
    KeepSection,
    Recipe,
    TrackSection,
    TrainSection,
)

_SECTIONS: dict[KeyPath, type[BaseModel]] = {
    (): Recipe,
    ("data",): DataSection,
    ("train",): TrainSection,
    ("checkpoint",): CheckpointSection,
    ("checkpoint", "keep"): KeepSection,
    ("track",): TrackSection,
}
_UNITS = {"ep": "epochs", "st": "steps", "s": "seconds", "m": "minutes", "h": "hours"}
_READ_EARLIER = ["extends", "unset", "vars"]  # keys of the top table that are gone before validation


class Vocabulary:
    """The keys of every table whose schema is known; `models` gains an entry for each component."""

    def __init__(self) -> None:
        self.models = dict(_SECTIONS)

    def keys(self, table: KeyPath) -> list[str]:
        """The keys that `table` may have; empty where that is not known."""
        if table not in self.models:
            return []
        names = [name for name in self.models[table].model_fields if (*table, name) != ("track", "trackers")]
        if table not in _SECTIONS:
            return ["use", *framework_keys(table), *names]
        return names if table else [*names, *_READ_EARLIER]

    def field(self, path: KeyPath) -> FieldInfo | None:
        """The declaration of the key at `path`."""
        model = self.models.get(path[:-1]) if path else None
        return model.model_fields.get(str(path[-1])) if model else None

    def takes_duration(self, path: KeyPath) -> bool:
        """True if the key at `path` is a Duration."""
        field = self.field(path)
        return field is not None and _mentions(field.annotation, Duration)

    def units(self, path: KeyPath, number: object = 1) -> dict[str, str]:
        """The units that `number`, the duration at `path`, may have, and what they mean."""
        field = self.field(path)
        adapter = TypeAdapter[object](field.rebuild_annotation() if field else Duration)
        known = {u: text for u, text in _UNITS.items() if path[-2:-1] != ("schedule",) or u in ("ep", "st")}
        return {unit: meaning for unit, meaning in known.items() if _accepts(adapter, f"{number}{unit}")}

    def suggest(self, path: KeyPath, value: object = None, *, section: bool) -> tuple[list[str], set[KeyPath]]:
        """Hints for an unknown key, or section, at `path`, and the keys that were probably meant."""
        table, key = path[:-1], str(path[-1])
        near = nearest(key, self.keys(table))
        foreign = FOREIGN_KEYS.get(key.lower())
        if section and foreign and foreign.path:  # is written as a key
            foreign = None
        hints: list[str] = []
        meant: set[KeyPath] = set()

        if section and (name := FOREIGN_SECTIONS.get(key.lower())):
            hints.append(f"did you mean [{name}]?")
            meant.add(tuple(name.split(".")))
        elif near and not (foreign and foreign.path == (*table, near)):
            name = f"[{dotted((*table, near))}]" if section else f"`{near}`"
            hints.append(f"did you mean {name}?")
            meant.add((*table, near))
        if foreign:
            hints.append(foreign.of(key, value))
            meant.add(foreign.path)

        others = [other for other in self.models if other != table and key in self.keys(other)]
        hints += [f"`{key}` is a key {_of(other)}" for other in others]
        if (keys := self.keys(table)) and not hints:
            hints.append(f"keys {_of(table)}: {', '.join(keys)}")
        return hints, meant


def _of(table: KeyPath) -> str:
    return f"of [{dotted(table)}]" if table else "at the top of the recipe"


def _accepts(adapter: TypeAdapter[object], value: str) -> bool:
    try:
        adapter.validate_python(value)
    except ValidationError:
        return False
    return True


def _mentions(annotation: object, wanted: type) -> bool:
    return annotation is wanted or any(_mentions(inner, wanted) for inner in get_args(annotation))
