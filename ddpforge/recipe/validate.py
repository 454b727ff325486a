"""Turns composed tables into a validated Recipe, or tells everything that is wrong with them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ddpforge.errors import PluginError
from ddpforge.recipe.checks import cross_check
from ddpforge.recipe.explain import Explainer
from ddpforge.recipe.layers import FRAMEWORK_KEYS, NAMED_SLOTS, SLOTS, Layers, Table, strings, used_name
from ddpforge.recipe.origins import KeyPath
from ddpforge.recipe.report import Problem, kind_of
from ddpforge.recipe.schema import Component, Recipe
from ddpforge.registry import Registry

LOCAL_FILE = re.compile(r"([^:]*\.py):[A-Za-z_][\w.]*")
"""A reference to code beside the recipe, `./file.py:Name`."""

_DEFAULTS = ("schedule", "strategy")    # components that a recipe need not name


def validate(layers: Layers, file: str, registry: Registry) -> tuple[Recipe | None, Table, list[Problem]]:
    """The recipe, the same as plain tables with all defaults, and what is wrong; without problems there is a recipe."""
    return _Validation(layers, file, registry).run()


class _Validation:
    def __init__(self, layers: Layers, file: str, registry: Registry) -> None:
        self.layers = layers
        self.registry = registry
        self.explainer = Explainer(layers, file, registry)
        self.options: dict[KeyPath, BaseModel] = {}

    def run(self) -> tuple[Recipe | None, Table, list[Problem]]:
        for key in _DEFAULTS:
            self.layers.tables.setdefault(key, {"use": Recipe.model_fields[key].default.use})
        shaped = self.shape()
        try:
            recipe = Recipe.model_validate_json(json.dumps(shaped))
        except ValidationError as error:
            self.explainer.explain(error.errors(), shaped)
            return None, {}, self.explainer.problems()
        ...
