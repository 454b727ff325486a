"""Explains the problems of a recipe in terms of its keys, with hints."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterable

from pydantic_core import ErrorDetails

from ddpforge.components.errors import located
from ddpforge.components.registry import OBJECT, Registry
from ddpforge.errors import Diagnostic, PluginError, SourceSpan
from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.layers import NAMED_SLOTS, SETS, SOURCES, Layers, inside, kind_at, used_name
from ddpforge.recipe.renamed import new_component, now_called, renamed_value, why_dropped
from ddpforge.recipe.report import KeyPath, did_you_mean, dotted, kind_of, shown
from ddpforge.recipe.toml import Table, Value
from ddpforge.recipe.vocabulary import (
    Vocabulary,
    choice_meant,
    duration_meant,
    foreign_use,
    hints_of_words,
    instead_of_never,
    precision_meant,
)

_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    **dict.fromkeys(("string_type", "path_type"), "a string"),
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "an array"),
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type", "mapping_type", "model_attributes_type"), "a table"),
}
_LIMITS = {
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "multiple_of": "a multiple of {multiple_of}",
    **dict.fromkeys(("string_too_short", "too_short"), "at least {min_length} long"),
    **dict.fromkeys(("string_too_long", "too_long"), "at most {max_length} long"),
    "finite_number": "a finite number",
}
_METRIC = "a metric is a class: derive it from ddpforge.interfaces.Metric, with __call__(self, outputs, targets)"
_NUMBER = re.compile(r"[-+]?(?:\d(?:_?\d)*+(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d+)?")


class Explainer:
    """Collects the problems of one recipe, each with its place and with hints to fix it."""

    def __init__(self, layers: Layers, file: str, registry: Registry) -> None:
        self.layers = layers
        self.file = file
        self.registry = registry
        self.vocabulary = Vocabulary()
        self._problems: list[Diagnostic] = []
        self._missing: dict[KeyPath, Diagnostic] = {}
        self._meant: set[KeyPath] = set()

    def problems(self) -> list[Diagnostic]:
        """Returns the problems found; omits a missing key if an unknown key was probably meant for it."""
        return [
            *self._problems,
            *(problem for path, problem in self._missing.items() if path not in self._meant),
        ]

    def add(self, path: KeyPath, message: str, *hints: str, on_key: bool = False) -> None:
        """Reports a problem with the value, or the key, at `path`."""
        self._problems.append(self._problem(path, path, message, hints, on_key))

    def explain(self, errors: Iterable[ErrorDetails], table: Table, at: KeyPath = ()) -> None:
        """Reports pydantic's errors in `table`, the table at the path `at`."""
        by_path: dict[KeyPath, list[ErrorDetails]] = {}
        for error in errors:
            by_path.setdefault((*at, *_keys_in(error, table)), []).append(error)
        for path, alternatives in by_path.items():
            # For a union pydantic reports every member: the deepest error is of the member that was meant.
            if not any(other != path and other[: len(path)] == path for other in by_path):
                self._explain(path, alternatives)

    def _explain(self, path: KeyPath, alternatives: list[ErrorDetails]) -> None:
        error = next((one for one in alternatives if one["type"] not in _EXPECTED), alternatives[0])
        kind, value, context = error["type"], error["input"], error.get("ctx", {})
        name, cause = f"`{dotted(path)}`", context.get("error")

        if kind == "extra_forbidden":
            self.unknown(path, value)
        elif kind == "missing":
            self.missing(path)
        elif isinstance(cause, PluginError):
            now = new_component(None, value) if isinstance(value, str) else value
            self.add(path, *((cause.message, *cause.hints) if now == value else (f"`{value}` is now `{now}`",)))
        elif kind in ("literal_error", "enum"):
            choices = re.split(r", | or ", str(context["expected"]).replace("'", ""))
            near = did_you_mean(value, choices) if isinstance(value, str) else []
            near = [f"did you mean `{meant}`?"] if (meant := _choice_meant(value, choices)) else near
            near = [] if choice_meant(value) == "" else near
            near = [f"`{value}` is now `{new}`"] if (new := renamed_value(path, value)) else near
            near = why_dropped(path, self._use(path[:-1]), value) or near
            near += hints_of_words(value)
            self.add(path, f"{name} cannot be {shown(value)}", *near, f"one of: {', '.join(choices)}")
        elif kind in _LIMITS:
            limits = {key: f"{bound:.15g}" if isinstance(bound, float) else bound for key, bound in context.items()}
            message = f"{name} must be {_LIMITS[kind].format_map(limits)}, not {shown(value)}"
            self.add(path, message, *self._meaning(path))
        elif kind in _EXPECTED:
            self.wrong_type(path, value, list(dict.fromkeys(_EXPECTED[one["type"]] for one in alternatives)))
        else:
            reason = str(cause) if cause else error["msg"][:1].lower() + error["msg"][1:]
            is_duration = self.vocabulary.takes_duration(path)
            needs_unit = is_duration and _NUMBER.fullmatch(str(value))
            hints = [*self._share(path, value), self._unit(path, value)] if needs_unit else []
            if isinstance(value, dict) and (used := next((value[one] for one in foreign_use() if one in value), None)):
                hints.append(f"write use = {shown(used)}")
            if is_duration and (meant := duration_meant(value)):
                hints.append(f'write {dotted(path[-1:])} = "{meant}"')
            hints = [*hints, *instead_of_never(path, value)] or self._meaning(path)
            self.add(path, f"{name} cannot be {shown(value)}: {reason}", *hints)

    # -- keys
    def unknown(self, path: KeyPath, value: object) -> None:
        """Reports a key, or a section, that its table does not have."""
        if found := now_called(path, value, self.layers.tables, _own_name):
            message, new, written = found
            self._meant.add(new)
            self.add(path, message, *written, *self._way_to_upgrade(path), on_key=True)
            return
        if hints := why_dropped(path, self._use(path[:-1])):
            self.add(path, f"unknown key `{dotted(path[-1:])}` {self._in(path[:-1])}", *hints, on_key=True)
            return
        section = isinstance(value, dict) and self._kind_at(path[:-1]) is None
        hints, meant = self.vocabulary.suggest(path, value, section=section)
        hints += self._share(path, value) if "ratio" in str(path[-1]) else []
        if path[:-1] in SETS and isinstance(value, dict) and "use" in value:
            one, noun = dotted(path[:-1]), "source" if path[:-1] == SOURCES else "set"
            hints = [
                f"[{one}] with `use` is one {noun}; for several {noun}s write tables [{one}.NAME], and no `use` in "
                f"[{one}]",
                f'if `use` comes from a recipe that this one extends, remove it: unset = ["{one}"]',
            ]
        if path[:-1] == ("data",) and not section and "train" not in self.layers.tables.get("data", {}):
            hints = ["the keys of a dataset are in [data.train], or in [data.eval] for evaluations"]
        self._meant |= meant
        what = f"section [{dotted(path)}]" if section else f"key `{dotted(path[-1:])}` {self._in(path[:-1])}"
        self.add(path, f"unknown {what}", *hints, on_key=True)

    def _way_to_upgrade(self, path: KeyPath) -> list[str]:
        """Returns a hint for a file that another file extends and that does not set its version."""
        source = self.layers.origin(path).source
        file = source is not None and source.label != "--set"
        is_part = file and "recipe" not in tomllib.loads(source.text)  # type: ignore[union-attr]
        return [f"ddpforge recipes upgrade {shlex.quote(source.label)}"] if source and is_part else []

    def missing(self, path: KeyPath) -> None:
        """Reports a required key or section that is missing."""
        path = ("data", "train") if path == ("data",) else path
        table, key = path[:-1], str(path[-1])
        if kind := self._kind_at(path):
            message = f"missing section [{dotted(path)}]"
            hints = [f'add [{dotted(path)}] with `use = "…"`; one of: {self._names(kind)}']
        elif model := self.vocabulary.models.get(path):
            required = [f"`{name}`" for name, inner in model.model_fields.items() if inner.is_required()]
            message = f"missing section [{dotted(path)}]"
            hints = [f"add [{dotted(path)}] with {' and '.join(required)}"]
        elif key == "use" and (kind := self._kind_at(table)):
            message = f"missing key `use` in [{dotted(table)}]"
            hints = [*self._instead_of_use(table), f"one of: {self._names(kind)}"]
        else:
            message = f"missing key `{key}` {self._in(table)}"
            hints = self._meaning(path)
            if not hints and table[:2] == ("task", "metrics"):
                hints = [_METRIC]
            if table and str(self._use(table)).startswith(OBJECT):
                hints = [f"set {dotted(path)} in the recipe, or give the object with it: functools.partial(…, {key}=…)"]
            if path in self.layers.dropped:
                value, use = self.layers.dropped[path]
                again = f"{dotted(path)} = {shown(value)}"
                hints.insert(0, f"`{again}` is an option of {shown(use)}, and was removed with it; set it again here")
        self._missing[path] = self._problem(path, table, message, hints, on_key=True)

    def _meaning(self, path: KeyPath) -> list[str]:
        """Returns the description of a key as a hint; [] if it has none."""
        field = self.vocabulary.field(path)
        return [f"{path[-1]}: {field.description}"] if field and field.description else []

    # -- values
    def wrong_type(self, path: KeyPath, value: object, expected: list[str]) -> None:
        """Reports a value of a wrong type; `expected` are the types that its key accepts."""
        if self.vocabulary.takes_duration(path):
            number = isinstance(value, int | float) and not isinstance(value, bool)
            hints = [*self._share(path, value), self._unit(path, value)] if number and value else []
            hints += instead_of_never(path, value)
            self.add(path, f"`{dotted(path)}` must be a duration, not {kind_of(value)}", *hints)
            return
        name = f"[{dotted(path)}]" if expected == ["a table"] else f"`{dotted(path)}`"
        hints = [hint for one in expected for hint in self._remedy(path, value, one)]
        self.add(path, f"{name} must be {' or '.join(expected)}, not {kind_of(value)}", *hints)

    def _remedy(self, path: KeyPath, value: object, expected: str) -> Iterable[str]:
        key = f"{dotted(path[-1:])} = " if isinstance(path[-1], str) else ""
        through = [name for name, _ in self.layers.origin(path).through if name.startswith("env:")]
        if through and expected != "a string":
            yield f"environment variables are text: use --set {dotted(path)}=… for numbers, true and false"
        elif isinstance(value, str) and expected in ("an integer", "a number") and _NUMBER.fullmatch(value):
            yield f"remove the quotes: {key}{value}"
        elif isinstance(value, str) and expected == "true or false" and value.lower() in ("true", "false"):
            yield f"write {key}{value.lower()}"
        elif isinstance(value, float) and expected == "an integer" and value.is_integer():
            yield f"write {key}{int(value)}"
        elif isinstance(value, list) and expected == "a table" and path == ("callbacks",):
            yield "each callback is a table, e.g. [callbacks.ema]"
        elif isinstance(value, str) and path == ("track",):
            yield f"each tracker is a table, e.g. [track.{value if value.isidentifier() else 'wandb'}]"
        elif isinstance(value, bool | int | float) and expected == "a string":
            field = self.vocabulary.field(path)
            patterns = [one.pattern for one in getattr(field, "metadata", ()) if getattr(one, "pattern", None)]
            if all(re.search(pattern, shown(value)) for pattern in patterns):
                yield f'add quotes: {key}"{shown(value)}"'
            else:
                yield from self._meaning(path)
        elif expected == "an array" and isinstance(value, int | float) and not isinstance(value, bool):
            yield f"it has several values, in brackets: {key}[{shown(value)}, …]"
        elif expected == "an array" and not isinstance(value, dict):
            yield f"put it in brackets: {key}[{shown(value)}]"
        elif self._kind_at(path) == "data" and isinstance(value, str) and re.search(r"[./]", value):
            kind = "csv" if value.endswith(".csv") else "parquet" if value.endswith(".parquet") else "…"
            yield f'a path is an option: [{dotted(path)}] with use = "{kind}" and path = {shown(value)}'
        elif self._kind_at(path) and isinstance(value, str):
            yield f"name a component by `use`: {dotted(path)}.use = {shown(value)}"
        elif self._kind_at(path):
            yield f"options go in a section [{dotted(path)}] or in braces: {key}{{ … }}"

    def _share(self, path: KeyPath, value: object) -> list[str]:
        """Returns a hint with the value as a share of this run's length, for a number below 1; else []."""
        train = self.layers.tables.get("train")
        try:
            length = Duration.parse(train["length"])  # type: ignore[index]
            share = float(value)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError):
            return []
        if not 0 < share < 1 or length.is_time:
            return []
        amount = share * length.value
        part = Duration(round(amount) if length.unit == "st" else round(amount, 6), length.unit)
        key = "warmup" if "warm" in str(path[-1]) else dotted(path[-1:])
        return [f'{share * 100:g} % of this run: {key} = "{part}"'] if part.value else []

    def _unit(self, path: KeyPath, value: object) -> str:
        examples = [f'"{value}{unit}" ({meaning})' for unit, meaning in self.vocabulary.units(path, value).items()]
        return f"it needs a unit: {dotted(path[-1:])} = {', '.join(examples)}"

    # -- places and names
    def _problem(
        self, path: KeyPath, at: KeyPath, message: str, hints: Iterable[str], on_key: bool = False
    ) -> Diagnostic:
        place = self.layers.origin(at).place(key=on_key) or SourceSpan(self.file)
        return Diagnostic(message, dotted(path), place, tuple(hints))

    def _in(self, table: KeyPath) -> str:
        if not table:
            return "at the top of the recipe"
        if isinstance(table[-1], int):
            return f"in `{dotted(table)}`"
        use = self._use(table)
        return f"in [{dotted(table)}]" + (f", which uses {shown(use)}" if use else "")

    def _use(self, table: KeyPath) -> Value:
        """Returns the `use` of the component with this table; None if it is not a component's."""
        return used_name(table, inside(self.layers.tables, table)) if table and self._kind_at(table) else None

    def _kind_at(self, path: KeyPath) -> str | None:
        return kind_at(path, self.layers.tables)

    def _names(self, kind: str) -> str:
        return ", ".join(self.registry.names(kind))

    def _instead_of_use(self, table: KeyPath) -> list[str]:
        inner = inside(self.layers.tables, table)
        found = [key for key in inner if key.lower() in foreign_use() and isinstance(inner[key], str)]
        return [f"instead of `{key}`, write use = {shown(located(inner[key]))}" for key in found]


def _own_name(path: KeyPath) -> str | None:
    """Returns the component that a table without `use` implies."""
    return str(path[-1]) if path[0] in NAMED_SLOTS else None


def _choice_meant(value: object, choices: list[str]) -> str | None:
    """Returns the choice that true, false or another tool's name probably means; None if there is none."""
    if isinstance(value, bool) and "off" in choices:
        return next(choice for choice in choices if (choice != "off") is value)
    return next((meant for meant in (precision_meant(value), choice_meant(value)) if meant in choices), None)


def _keys_in(error: ErrorDetails, table: Table) -> KeyPath:
    """Returns the part of pydantic's location that is in the recipe, without names of union members."""
    path: KeyPath = ()
    value: Value = table
    for part in error["loc"]:
        known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        if part in known:
            value = value[part]
            path = (*path, part)
    return (*path, error["loc"][-1]) if error["type"] == "missing" else path
