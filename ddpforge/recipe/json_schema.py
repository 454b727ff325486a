"""A JSON Schema of recipes, with the options of every installed component: what TOML editors complete and check by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from ddpforge.errors import PluginError
from ddpforge.recipe.layers import FRAMEWORK_KEYS, NAMED_SLOTS, SLOTS, inside
from ddpforge.recipe.origins import KeyPath
from ddpforge.recipe.schema import Recipe
from ddpforge.registry import Registry

Schema = dict[str, Any]

_REFERENCE = {"type": "string", "pattern": r"\$\{"}     # `${vars.x}` may stand where a number belongs
_PATHS = {"model": ("model",)}


class _Quiet(GenerateJsonSchema):
    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012


def recipe_schema(registry: Registry) -> Schema:
    """The schema (draft 7) of a recipe whose components are those in `registry`.

    No key is required, as what a recipe extends may hold it. A component's options follow from its `use` by a chain of
    `if`/`then`: editors then point at the wrong option, where a `oneOf` would mark the whole table.
    """
    ...
