"""JSON Schema of recipes, with the options of every installed component, for TOML editors."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from ddpforge.components.kinds import KINDS
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError
from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.layers import NAMED_SLOTS, SCHEDULES, SLOTS, SOURCES, VARIATIONS, framework_keys
from ddpforge.recipe.schema import (
    CheckpointSection,
    DataSection,
    KeepSection,
    Recipe,
    SourceComponent,
    TrackSection,
    TrainSection,
)

Schema = dict[str, Any]

_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}  # `${vars.x}` may be a number
_VARIABLES: Schema = {
    "type": "object",
    "description": "Values for references ${vars.name} in strings.",
    "additionalProperties": {"type": ["string", "integer", "number", "boolean"]},
}
_EXTENDS: Schema = {
    "description": "Recipes that this one changes; paths from its folder, later ones win.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}
_UNSET: Schema = {
    "description": "Keys and tables of the extended recipes that this one removes, e.g. callbacks.ema.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def recipe_schema(registry: Registry) -> Schema:
    """Returns the schema (draft 7) of recipes that use the components in `registry`.

    No key is required, because it may be in an extended recipe.
    """
    # `if` and `then` select the options of a component by its `use`: so editors mark a wrong option, not the table.
    slot = {path: {"$ref": f"#/$defs/{kind}"} for path, kind in SLOTS.items()}
    data = {str(path[1]): slot.pop(path) for path in SLOTS if path[0] == "data"}
    nouns = {"train": "sources of training data", "eval": "evaluation sets"}
    data |= {key: _sets(data[key], noun) for key, noun in nouns.items()}
    sections = {
        "data": _table(DataSection, **data),
        "train": _table(TrainSection, device=_devices(registry)),
        "checkpoint": _table(CheckpointSection, keep=_table(KeepSection)),
        "track": _named_slots("tracker", registry, _table(TrackSection)),
        "callbacks": _named_slots("callback", registry, {"type": "object", "properties": {}}),
        **{str(path[0]): reference for path, reference in slot.items()},
    }
    kinds = sorted({*SLOTS.values(), *NAMED_SLOTS.values()})
    definitions = {kind: _component(kind, registry.names(kind)) for kind in kinds}
    for kind in kinds:
        definitions |= {f"{kind}.{name}": _options(kind, name, registry) for name in registry.names(kind)}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "ddpforge recipe",
        **_table(Recipe, **sections, extends=_EXTENDS, unset=_UNSET, vars=_VARIABLES),
        "$defs": definitions,
    }


def _table(model: type[BaseModel], /, **inner: Schema) -> Schema:
    """Returns the schema of a section; `inner` are its tables."""
    schema = _schema(model, "")
    values = {key: value for key, value in schema["properties"].items() if key not in ("trackers", *inner)}
    return {**schema, "properties": {**values, **inner}}


def _devices(registry: Registry) -> Schema:
    """Returns the schema of `train.device`: the names of installed kinds of devices."""
    about = {key: value for key, value in _schema(TrainSection, "")["properties"]["device"].items() if key != "type"}
    names = {"enum": ["auto", *registry.names("device")]}
    return {"anyOf": [names, _REFERENCE], **{key: about[key] for key in ("description", "default")}}


def _sets(component: Schema, nouns: str) -> Schema:
    """Returns the schema of [data.eval]: a component's table, or without `use` a table of several, or only options."""
    uses = {"type": "object", "required": ["use"]}
    inner = {"if": uses, "then": component}
    several = {"description": f"Several {nouns} by name, or the options of one.", "additionalProperties": inner}
    return {"type": "object", "allOf": [inner, {"if": {"not": uses}, "then": several}]}


def _component(kind: str, names: list[str]) -> Schema:
    """Returns the schema of a component's table. The options depend on `use`."""
    use = {"description": f"Which {kind}.", "anyOf": [{"enum": names}, {"type": "string", "pattern": r":|\$\{"}]}
    return {
        "type": "object",
        "properties": {"use": use},
        "allOf": [
            {
                "if": {"properties": {"use": {"const": name}}, "required": ["use"]},
                "then": {"$ref": f"#/$defs/{kind}.{name}"},
            }
            for name in names
        ],
    }


def _named_slots(kind: str, registry: Registry, table: Schema) -> Schema:
    """Returns the schema of a table of components. Its keys are the default for `use`."""
    any_of_kind = {"$ref": f"#/$defs/{kind}"}
    for name in registry.names(kind):
        implied = {"if": {"not": {"required": ["use"]}}, "then": {"$ref": f"#/$defs/{kind}.{name}"}}
        table["properties"][name] = {"allOf": [any_of_kind, implied]}
    return {**table, "additionalProperties": any_of_kind}


def _options(kind: str, name: str, registry: Registry) -> Schema:
    """Returns the schema of one component's table; one that allows all keys if the component cannot be loaded."""
    try:
        schema = _schema(registry.options_model(kind, name), f"{kind}.{name}/$defs/")
    except PluginError as error:
        return {"type": "object", "description": error.message}
    own: Schema = {}
    if keys := KINDS[kind].framework_keys:
        table = Recipe.model_fields[kind].annotation
        assert isinstance(table, type)
        own = {key: _schema(table, "")["properties"][key] for key in keys} | _variations(kind)
        if SCHEDULES[0] == kind:
            own[SCHEDULES[1]] = {"type": "object", "additionalProperties": {"$ref": "#/$defs/schedule"}}
    if kind == SLOTS[SOURCES]:  # also allowed in other tables of datasets, which have no schema of their own
        properties = _schema(SourceComponent, "")["properties"]
        own = {key: properties[key] for key in framework_keys((*SOURCES, ""))}
    return {**schema, "properties": {"use": {}, **own, **schema["properties"]}}


def _variations(kind: str) -> Schema:
    """Returns the schemas of variation tables (groups, updates). Their options depend on the table around them."""
    found: Schema = {}
    for path, model in VARIATIONS.items():
        properties = _schema(model, "")["properties"] | {"schedule": {"$ref": "#/$defs/schedule"}}
        inner = {"use": {"type": "string"}, **{key: properties[key] for key in framework_keys((*path, ""))}}
        table = {"type": "object", "properties": inner}
        found |= {path[1]: {"type": "object", "additionalProperties": table}} if SLOTS[path[:1]] == kind else {}
    return found


class _Generator(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012

    def encode_default(self, dft: object) -> object:
        return str(dft) if isinstance(dft, Duration) else super().encode_default(dft)


def _schema(model: type[BaseModel], place: str) -> Schema:
    """Returns the schema of a model, adapted to recipes; `place` is the prefix of references to its definitions."""
    schema = model.model_json_schema(schema_generator=_Generator, ref_template=f"#/$defs/{place}{{model}}")
    opened: Schema = _opened({"properties": {}, **schema})
    opened.pop("required", None)
    return opened


def _opened(schema: Any) -> Any:  # a schema, or true or false
    """Returns `schema` without titles and null; numbers, booleans and choices may also be references."""
    if not isinstance(schema, dict):
        return schema
    opened: Schema = {}
    for key, inner in schema.items():
        if key in ("properties", "$defs"):
            opened[key] = {name: _opened(one) for name, one in inner.items()}
        elif key in ("items", "additionalProperties"):
            opened[key] = _opened(inner)
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            opened[key] = [_opened(one) for one in inner if one != {"type": "null"}]
        elif key != "title" and (key, inner) != ("default", None):
            opened[key] = inner

    if opened.get("type") not in ("integer", "number", "boolean") and not opened.keys() & {"enum", "const"}:
        return opened
    about = {key: opened.pop(key) for key in ("description", "default") if key in opened}
    return {**about, "anyOf": [opened, _REFERENCE]}
