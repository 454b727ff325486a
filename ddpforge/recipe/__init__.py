"""Recipes: reads TOML text, validates it to a typed run description, and reports its errors."""

from ddpforge.errors import Place, Problem
from ddpforge.recipe.bundled import bundled, find_recipe
from ddpforge.recipe.load import LoadedRecipe, check_world, load_recipe
from ddpforge.recipe.plan import BatchPlan, plan_batch
from ddpforge.recipe.report import render
from ddpforge.recipe.schema import Recipe
from ddpforge.recipe.toml import Origin

__all__ = [
    "BatchPlan",
    "LoadedRecipe",
    "Origin",
    "Place",
    "Problem",
    "Recipe",
    "bundled",
    "check_world",
    "find_recipe",
    "load_recipe",
    "plan_batch",
    "render",
]
