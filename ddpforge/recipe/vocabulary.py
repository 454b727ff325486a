"""The keys that one recipe may have, and where; and what other tools call them, which `other_tools.toml` lists."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.layers import framework_keys
from ddpforge.recipe.report import KeyPath, dotted, nearest
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
        foreign = foreign_keys().get(key.lower())
        if section and foreign and foreign.path:  # is written as a key
            foreign = None
        hints: list[str] = []
        meant: set[KeyPath] = set()

        if section and (name := foreign_sections().get(key.lower())):
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


# ---------------------------------------------------------------------------------------------- other tools
class Foreign(NamedTuple):
    """A hint for another tool's key, and the path of its namesake here (empty where it has none).

    Where there is a namesake, `text` is how it is written, with an example's value.
    """

    hint: str
    path: KeyPath = ()
    text: str = ""

    def of(self, alias: str, value: object) -> str:
        """The hint for `alias = value`: with that value, where it can be the namesake's."""
        if not self.text:
            return self.hint
        return self.hint.replace(f"`{self.text}`", f"`{_with(self.text, alias.lower(), value)}`")


@cache
def _other_tools() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))


@cache
def foreign_keys() -> dict[str, Foreign]:
    """Returns what to do instead of another tool's key, by that key in lower case."""
    hints: dict[str, Foreign] = {}
    for row in _other_tools()["keys"]:
        section, key = row["section"], row["write"].partition(" ")[0]
        where = f"in [{section}]" if section else "at the top of the recipe"
        hint = f"ddpforge writes `{row['write']}` {where}"
        entry = Foreign(hint, (section, key) if section else (key,), row["write"])
        hints |= dict.fromkeys(row["aliases"], entry)
    for row in _other_tools()["hints"]:
        meant = tuple(row["meant"].split(".")) if "meant" in row else ()
        hints |= dict.fromkeys(row["aliases"], Foreign(row["hint"], meant))
    return hints


@cache
def foreign_sections() -> dict[str, str]:
    """Returns the section that another tool means, by its own name for it in lower case."""
    return {alias: section for section, aliases in _other_tools()["sections"].items() for alias in aliases}


def foreign_use() -> list[str]:
    """Returns what other tools write where a recipe says `use`."""
    found: list[str] = _other_tools()["use"]
    return found


def precision_meant(value: object) -> str | None:
    """Returns the precision that another tool spells so, e.g. "16-mixed"."""
    known: dict[str, str] = _other_tools()["precisions"]
    return known.get(str(value).lower())


def _with(text: str, alias: str, value: object) -> str:
    """`text`, a key with an example's value, with `value` instead where that can be meant."""
    key, _, example = text.partition(" = ")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if key == "precision":
        meant = precision_meant(alias) if isinstance(value, bool) else precision_meant(value)
        return f'precision = "{meant if value and meant else "fp32" if value is False else "bf16"}"'
    if isinstance(value, bool):
        return f"{key} = {str(value).lower()}" if example in ("true", "false") else text
    if "{" in example:
        return re.sub(r"\d+", str(value), text, count=1) if isinstance(value, int) else text
    if re.fullmatch(r'"\d+\w+"', example):
        if "ratio" in alias:
            return f'{key} = "{value * 100:g}%"' if isinstance(value, float) and 0 < value < 1 else text
        unit = next(
            (unit for word, unit in _other_tools()["units"].items() if word in alias), re.sub(r'["\d]', "", example)
        )
        whole = unit != "st" or (number and float(str(value)).is_integer())
        return f'{key} = "{value}{unit}"' if number and whole else text
    quoted = f'"{value}"' if isinstance(value, str) and example.startswith('"') else text
    return f"{key} = {value}" if number and example[0].isdigit() else f"{key} = {quoted}" if quoted != text else text
