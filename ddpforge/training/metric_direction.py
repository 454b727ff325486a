"""Direction (`mode`) of the metrics that a recipe decides by: adds the one that a metric of the task declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ddpforge.interfaces import Metric
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.toml import Origin

__all__ = ["missing_direction", "with_direction"]


def with_direction(loaded: LoadedRecipe, reports: Mapping[str, Metric]) -> LoadedRecipe:
    """Returns the recipe with each missing `mode` that a metric of the task declares, unless its name implies it.

    The mode is then part of the resolved recipe: lists of checkpoints read it without the task, and a resumed run
    reports a metric that declares another direction than before.
    """
    for path, options in _deciding(loaded):
        metric = str(options["monitor" if path[0] == "checkpoint" else "metric"])
        declared = _declared(metric, reports, loaded.recipe.data.evaluations)
        if declared is not None and declared != lower_is_better(metric):
            loaded = _with_mode(loaded, path, "min" if declared else "max")
    return loaded


def missing_direction(loaded: LoadedRecipe) -> str | None:
    """Returns the metric of `checkpoint.keep.monitor` if its direction is not known; otherwise None."""
    keep = loaded.recipe.checkpoint.keep
    return keep.monitor if keep.monitor and keep.mode is None and lower_is_better(keep.monitor) is None else None


def _deciding(loaded: LoadedRecipe) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    """Yields the tables that decide by a metric and have no `mode`, each with its options."""
    keep = dict(loaded.recipe.checkpoint.keep)
    tables = {("checkpoint", "keep"): keep} if keep["monitor"] else {}
    tables |= {
        ("callbacks", name): one.options for name, one in loaded.recipe.callbacks.items() if "metric" in one.options
    }
    yield from ((path, options) for path, options in tables.items() if options.get("mode", "") is None)


def _declared(metric: str, reports: Mapping[str, Metric], sets: Mapping[str, object]) -> bool | None:
    """Returns True if the metric of a full name, such as "eval/NAME/f1/macro", declares that lower is better.

    None if it declares no direction.
    """
    prefix, _, rest = metric.partition("/")
    if prefix == "eval" and "" not in sets:
        rest = rest.partition("/")[2]
    found = reports.get(rest) or reports.get(rest.rpartition("/")[0])
    return found.lower_is_better if found else None


def _with_mode(loaded: LoadedRecipe, path: tuple[str, str], mode: str) -> LoadedRecipe:
    recipe, (first, second) = loaded.recipe, path
    if first == "checkpoint":
        keep = recipe.checkpoint.keep.model_copy(update={"mode": mode})
        changed: dict[str, Any] = {"checkpoint": recipe.checkpoint.model_copy(update={"keep": keep})}
    else:
        callback = recipe.callbacks[second]
        callback = callback.model_copy(update={"options": {**callback.options, "mode": mode}})
        changed = {"callbacks": {**recipe.callbacks, second: callback}}
    tables = loaded.tables | {first: loaded.tables[first] | {second: loaded.tables[first][second] | {"mode": mode}}}
    origins = {**loaded.origins, (*path, "mode"): Origin()}
    return replace(loaded, recipe=recipe.model_copy(update=changed), tables=tables, origins=origins)
