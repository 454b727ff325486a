"""Chooses the components that a recipe names, before data and model are built; needs no torch unless they do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ddpforge.components.registry import Registry
from ddpforge.components.registry import build as build_component
from ddpforge.interfaces import Task, mix
from ddpforge.preflight import Problems
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.layers import kind_at
from ddpforge.recipe.load import check_world
from ddpforge.training.contract import contract_of
from ddpforge.training.metric_direction import with_direction
from ddpforge.training.stages import MISSING, Chosen
from ddpforge.training.turns import turns_of

__all__ = ["TEACHERS", "choose"]

TEACHERS = 0x7EAC  # keeps the random numbers of models that a task holds apart from all others


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

    Without `seeds`, models that a task holds have other weights each time, and torch is not imported to seed them.
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
            strategy, other_layout = strategy.evaluating(ranks)
        data_ranks = strategy.data_ranks(ranks)
    with problems.at("task"):
        if seeds:
            import torch

            torch.manual_seed(mix(loaded.recipe.train.seed, TEACHERS))  # it may hold models
        task = build_component(registry, "task", loaded.recipe.task)
        loaded = with_direction(loaded, task.reports)
    recipe = loaded.recipe
    if trains:
        with problems.at("train", "global_batch"):
            # The batch of a strategy that is not imported is checked as if each rank saw other data.
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
        turns=_turns(task, recipe.optimizer.updates, problems),
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


def _turns(task: Task, given: Mapping[str, Any], problems: Problems) -> dict[str, Any]:
    """Returns the recipe's turns in the order of the task, if they are the same; preflight finds others."""
    found: dict[str, Any] = {}
    with problems.at("task"):
        names = turns_of(task)
        found = {name: given[name] for name in names} if given.keys() == set(names) else {}
    return found
