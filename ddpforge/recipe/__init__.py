"""Recipes: reads TOML text, validates it to a typed run description, and reports its errors."""

from ddpforge.errors import Diagnostic, SourceSpan
from ddpforge.recipe.bundled import bundled, find_recipe
from ddpforge.recipe.load import LoadedRecipe, check_world, load_recipe
from ddpforge.recipe.report import render
from ddpforge.recipe.run_plan import BatchPlan, plan_batch
from ddpforge.recipe.schema import Recipe
from ddpforge.recipe.toml import Origin

__all__ = [
    "BatchPlan",
    "Diagnostic",
    "LoadedRecipe",
    "Origin",
    "Recipe",
    "SourceSpan",
    "bundled",
    "check_world",
    "find_recipe",
    "load_recipe",
    "plan_batch",
    "render",
]
