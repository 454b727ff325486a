"""Keys of a recipe by table, and the names of other tools for them, from `other_tools.toml`."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ddpforge.components.errors import nearest
from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.layers import framework_keys
from ddpforge.recipe.report import KeyPath, dotted
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
_READ_EARLIER = ["extends", "unset", "vars"]  # keys of the top table that are removed before validation


class Vocabulary:
    """Keys of every table with a known schema; validation adds an entry to `models` for each component."""

    def __init__(self) -> None:
        self.models = dict(_SECTIONS)

    def keys(self, table: KeyPath) -> list[str]:
        """Returns the keys that `table` may have; empty if they are not known."""
        if table not in self.models:
            return []
        names = [name for name in self.models[table].model_fields if (*table, name) != ("track", "trackers")]
        if table not in _SECTIONS:
            return ["use", *framework_keys(table), *names]
        return names if table else [*names, *_READ_EARLIER]

    def field(self, path: KeyPath) -> FieldInfo | None:
        """Returns the declaration of the key at `path`; None if there is none."""
        model = self.models.get(path[:-1]) if path else None
        return model.model_fields.get(str(path[-1])) if model else None

    def takes_duration(self, path: KeyPath) -> bool:
        """True if the key at `path` is a Duration."""
        field = self.field(path)
        return field is not None and _mentions(field.annotation, Duration)

    def units(self, path: KeyPath, number: object = 1) -> dict[str, str]:
        """Returns the units that the duration at `path` may have with this number, and their meanings."""
        field = self.field(path)
        adapter = TypeAdapter[object](field.rebuild_annotation() if field else Duration)
        known = {u: text for u, text in _UNITS.items() if path[-2:-1] != ("schedule",) or u in ("ep", "st")}
        return {unit: meaning for unit, meaning in known.items() if _accepts(adapter, f"{number}{unit}")}

    def suggest(self, path: KeyPath, value: object = None, *, section: bool) -> tuple[list[str], set[KeyPath]]:
        """Returns hints for an unknown key or section at `path`, and the keys that were probably meant."""
        table, key = path[:-1], str(path[-1])
        near = nearest(key, self.keys(table))
        foreign = foreign_keys().get(key.lower())
        own = foreign_options().get(key.lower(), [])
        if meant_here := next((one for one in own if one in self.keys(table)), None):
            return [f"did you mean `{meant_here}`?"], {(*table, meant_here)}
        if section and foreign and foreign.path:  # it is a key here, not a section
            foreign = None
        hints: list[str] = []
        meant: set[KeyPath] = set()

        if section and (name := foreign_sections().get(key.lower())):
            hints.append(f"did you mean [{name}]?")
            meant.add(tuple(name.split(".")))
        elif near and not foreign:
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
    """Hint for another tool's key.

    Args:
        path: path of the equivalent key in a recipe; empty if there is none
        text: the equivalent key with an example value, in TOML
    """

    hint: str
    path: KeyPath = ()
    text: str = ""

    def of(self, alias: str, value: object) -> str:
        """Returns the hint for `alias = value`, with that value if the equivalent key can have it."""
        if not self.text:
            return self.hint
        return self.hint.replace(f"`{self.text}`", f"`{_with(self.text, alias.lower(), value)}`")


@cache
def _other_tools() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))


@cache
def foreign_keys() -> dict[str, Foreign]:
    """Returns the hints for other tools' keys, by the key in lower case."""
    hints: dict[str, Foreign] = {}
    for row in _other_tools()["keys"]:
        section, key = row["section"], row["write"].partition(" ")[0]
        where = f"in [{section}]" if section else "at the top of the recipe"
        needs = f", which needs `{row['needs']}` there" if "needs" in row else ""
        hint = f"ddpforge writes `{row['write']}` {where}{needs}"
        entry = Foreign(hint, (section, key) if section else (key,), row["write"])
        hints |= dict.fromkeys(row["aliases"], entry)
    for row in _other_tools()["hints"]:
        meant = tuple(row["meant"].split(".")) if "meant" in row else ()
        hints |= dict.fromkeys(row["aliases"], Foreign(row["hint"], meant))
    return hints


@cache
def foreign_options() -> dict[str, list[str]]:
    """Returns the names of ddpforge's options for an option of another tool, in lower case."""
    found: dict[str, list[str]] = {}
    for option, aliases in _other_tools()["options"].items():
        for alias in aliases:
            found.setdefault(alias, []).append(option)
    return found


@cache
def foreign_sections() -> dict[str, str]:
    """Returns the equivalent sections, by another tool's name in lower case."""
    return {alias: section for section, aliases in _other_tools()["sections"].items() for alias in aliases}


def foreign_use() -> list[str]:
    """Returns other tools' keys for `use`."""
    found: list[str] = _other_tools()["use"]
    return found


def precision_meant(value: object) -> str | None:
    """Returns the precision for another tool's name, e.g. "16-mixed"; None if it is unknown."""
    known: dict[str, str] = _other_tools()["precisions"]
    return known.get(str(value).lower())


def choice_meant(value: object) -> str | None:
    """Returns the value of a key with a choice for another tool's name, e.g. "gpu"; None if it is unknown.

    "" is for a value that ddpforge lacks, although it resembles another.
    """
    known: dict[str, str] = _other_tools()["values"]
    return known.get(str(value).lower().partition(":")[0])


def hints_of_words(value: object) -> list[str]:
    """Returns the hints for words within a value, e.g. "fp8-mixed"."""
    return [hint for word, hint in _other_tools()["within"].items() if word in str(value).lower()]


def instead_of_never(path: KeyPath, value: object) -> list[str]:
    """Returns a hint for a duration that cannot be turned off, if the value tries that."""
    off = value is False or str(value).lower() in ("never", "none", "no", "off", "false", "0", "")
    hint = _other_tools()["never"].get(dotted(path)) if off else None
    return [hint] if hint else []


_SPELLED = re.compile(r"(\d+(?:\.\d+)?)[ _-]?([A-Za-z]+)")


def duration_meant(value: object) -> str | None:
    """Returns the duration for one in words, "1000st" for "1000 steps"; None if `value` is not one."""
    if both := re.fullmatch(r"(\d+)h(\d+)m?", str(value)):
        return f"{60 * int(both[1]) + int(both[2])}m"
    found = _SPELLED.fullmatch(str(value).strip())
    units: dict[str, str] = _other_tools()["duration_units"]
    known = units | {unit: unit for unit in units.values()}
    unit = known.get(found[2].lower()) if found else None
    meant = f"{found[1]}{unit}" if found and unit else None
    return None if meant == value else meant


def _with(text: str, alias: str, value: object) -> str:
    """Replaces the example value in `text` (a key with an example) by `value`, if the key can have it."""
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
