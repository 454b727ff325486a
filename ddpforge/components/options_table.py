"""Table of a component's options for display, with types and values in TOML's terms."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

__all__ = ["OptionRow", "options_table"]


@dataclass(frozen=True)
class OptionRow:
    """Row for one option; all fields are text in TOML's terms."""

    name: str
    type: str
    default: str | None  # None if the option is required
    description: str
    limits: str
    example: str  # a valid value


class _JsonSchema(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def options_table(model: type[BaseModel]) -> list[OptionRow]:
    """Returns a row for each option of a model from `options_model`, in the order of the signature."""
    schema = model.model_json_schema(schema_generator=_JsonSchema)
    defaults = model.model_construct().model_dump(mode="json", by_alias=True, warnings=False, fallback=str)
    required = schema.get("required", ())
    definitions = schema.get("$defs", {})
    return [
        OptionRow(
            name=name,
            type=_type_text(option, definitions),
            default=None if name in required else _toml_text(defaults[name]),
            description=_description(option),
            limits=", ".join(_limits(option)),
            example=_toml_text(_example(option, definitions)),
        )
        for name, option in schema["properties"].items()
    ]


def _type_text(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    inner = partial(_type_text, definitions=definitions)
    match schema:
        case {"$ref": str() as reference}:
            return inner(definitions[reference.rpartition("/")[2]])
        case {"x-toml": str() as name}:
            return name
        case {"const": value}:
            return _toml_text(value)
        case {"enum": values}:
            return " | ".join(_toml_text(value) for value in values)
        case {"anyOf": members}:
            texts = [inner(member) for member in members if member != {"type": "null"}]
            return " | ".join(dict.fromkeys(texts))
        case {"prefixItems": items}:
            return f"[{', '.join(inner(item) for item in items)}]"
        case {"type": "array"}:
            return f"array of {inner(schema.get('items', {}))}"
        case {"type": "object", "additionalProperties": dict() as values}:
            return f"table of {inner(values)}"
        case {"type": "string", "format": str() as form}:
            return form
        case {"type": str() as name}:
            return {"number": "float", "object": "table"}.get(name, name)
        case _:
            return "any"


_NO_LIMIT = (None, -(2**63), 2**63)  # the range of _Integer is not shown
_LIMITS = {
    "minimum": ">= {}",
    "exclusiveMinimum": "> {}",
    "maximum": "<= {}",
    "exclusiveMaximum": "< {}",
    "multipleOf": "a multiple of {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "pattern": "matches {}",
}


def _limits(schema: Mapping[str, Any]) -> list[str]:
    if schema.get("x-toml") == "duration":
        return []  # its type has the pattern
    limits = [text.format(schema[key]) for key, text in _LIMITS.items() if schema.get(key) not in _NO_LIMIT]
    limits = [re.sub(r"\b1 (character|item)s$", r"1 \1", limit) for limit in limits]
    if "prefixItems" in schema:
        limits = []  # the type of a tuple shows the number of items
    for member in schema.get("anyOf", ()):
        limits += _limits(member)
    for item in schema.get("prefixItems", [schema["items"]] if "items" in schema else []):
        limits += [f"each {limit}" for limit in _limits(item)]
    return list(dict.fromkeys(limits))


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> object:
    inner = partial(_example, definitions=definitions)
    match schema:
        case {"$ref": str() as reference}:
            return inner(definitions[reference.rpartition("/")[2]])
        case {"examples": [first, *_]} | {"enum": [first, *_]} | {"const": first}:
            return first
        case {"anyOf": [first, *_]}:
            return inner(first)
        case {"prefixItems": items}:
            return [inner(item) for item in items]
        case {"type": "array"}:
            return [inner(schema.get("items", {}))] * schema.get("minItems", 1)
        case {"type": "integer" | "number" as name}:
            return _example_number(schema, int if name == "integer" else float)
        case {"type": "boolean"}:
            return True
        case {"type": "object"}:
            return {}
        case _:
            return "..."


def _example_number(limits: Mapping[str, Any], number: type[int] | type[float]) -> object:
    least, most = limits.get("minimum", -inf), limits.get("maximum", inf)
    above, below = limits.get("exclusiveMinimum", -inf), limits.get("exclusiveMaximum", inf)
    for value in (1, 0.5, most, least, above + 1):
        if least <= value <= most and above < value < below and number(value) == value:
            return number(value)
    return 1


def _description(schema: Mapping[str, Any]) -> str:
    """Returns the option's description, or that of the member of `T | None` that has one."""
    own = [schema, *schema.get("anyOf", ())]
    return next((part["description"] for part in own if "description" in part), "")


def _toml_text(value: object) -> str:
    match value:
        case None:
            return "unset"
        case dict():
            pairs = [f"{json.dumps(key)} = {_toml_text(item)}" for key, item in value.items()]
            return f"{{ {', '.join(pairs)} }}" if pairs else "{}"
        case list():
            return f"[{', '.join(_toml_text(item) for item in value)}]"
        case float():
            return repr(value)  # TOML's spelling is the same, also for inf and nan
        case _:
            return json.dumps(value, ensure_ascii=False)
