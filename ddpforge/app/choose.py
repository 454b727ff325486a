"""Builds the recipe's components that need neither data nor model. Imports torch only if they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpforge.components.registry import Registry
from ddpforge.components.registry import build as build_component
from ddpforge.interfaces import Task, mix
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.layers import kind_at
from ddpforge.recipe.load import check_world
from ddpforge.training.contract import contract_of
from ddpforge.training.metric_direction import with_direction
from ddpforge.training.problems import Problems
from ddpforge.training.stages import MISSING, Chosen
from ddpforge.training.updates import update_names

__all__ = ["TEACHERS", "choose"]

TEACHERS = 0x7EAC  # mixed into the seed of models that a task holds, so that no other RNG has this seed


def choose(
    loaded: LoadedRecipe,
    registry: Registry,
    problems: Problems,
    *,
    ranks: int,
    device: str | None = None,
    trains: bool = True,
    only: Sequence[str] = (),
    resumes: bool = False,
    seeds: bool = True,
) -> Chosen:
    """Builds the components of a recipe that need neither data nor model, for `ranks` ranks; see `Chosen`.

    `seeds`: seed torch's RNG before the task is built, for models that the task holds. This imports torch.
    """
    strategy, task, data_ranks, batch, other_layout = MISSING, MISSING, 1, MISSING, ""
    problems.not_imported += [
        component.use
        for path, component in loaded.recipe.components().items()
        if not registry.imports(str(kind_at(path, loaded.tables)), component.use)
    ]
    with problems.at("strategy"):
        strategy = build_component(registry, "strategy", loaded.recipe.strategy)
        contract_of(strategy)
        if not trains:
            strategy, other_layout = strategy.for_evaluation(ranks)
        data_ranks = strategy.data_ranks(ranks)
    with problems.at("task"):
        if seeds:
            import torch

            torch.manual_seed(mix(loaded.recipe.train.seed, TEACHERS))  # the task may build models
        task = build_component(registry, "task", loaded.recipe.task)
        loaded = with_direction(loaded, task.reports)
    recipe = loaded.recipe
    if trains:
        with problems.at("train", "global_batch"):
            # If the strategy is not imported, assume that each rank is a data-parallel rank.
            batch = check_world(loaded, ranks if recipe.strategy.use in problems.not_imported else data_ranks)
    return Chosen(
        loaded=loaded,
        registry=registry,
        ranks=ranks,
        device=device,
        trains=trains,
        only=tuple(only),
        resumes=resumes,
        strategy=strategy,
        data_ranks=data_ranks,
        task=task,
        callbacks=_named(registry, problems, "callbacks", "callback", recipe.callbacks),
        trackers=_named(registry, problems, "track", "tracker", recipe.track.trackers) if trains else {},
        updates=_updates(task, recipe.optimizer.updates, problems),
        batch=batch,
        other_layout=other_layout,
    )


def _named(
    registry: Registry, problems: Problems, table: str, kind: str, components: Mapping[str, Any]
) -> dict[str, Any]:
    found = {}
    for name, component in components.items():
        with problems.at(table, name):
            found[name] = build_component(registry, kind, component)
    return found


def _updates(task: Task, given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Returns the recipe's updates in the task's order; empty if they are not the task's, which a check reports."""
    found: dict[str, Any] = {}
    with problems.at("task"):
        names = update_names(task)
        found = {name: given[name] for name in names} if given.keys() == set(names) else {}
    return found
