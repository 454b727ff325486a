"""Builds the stages of a recipe in one process, as `ddpforge check --build` and a run do, and collects all problems."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from ddpforge.app.build import build, deal
from ddpforge.app.choose import choose
from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.guard.samples import FirstSamples, check_each_dataset
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import SingleRank
from ddpforge.recipe import load_recipe
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.checks import check, check_built, check_samples
from ddpforge.training.problems import Problems
from ddpforge.training.stages import Built, Chosen, Dealt

ALONE = World(global_ranks=SingleRank(), dp_ranks=SingleRank(), device=torch.device("cpu"), local_rank=0)


@dataclass
class Staged:
    """A recipe built up to some stage; `fits` is true if task and data match."""

    stage: Built
    problems: Problems
    fits: bool

    def evaluate(self) -> dict[str, FirstSamples]:
        """Evaluates a few samples of every dataset, as a check does."""
        return check_each_dataset(self.stage, self.problems) if self.fits else {}

    def errors(self, *, strict: bool = False) -> dict[str, str]:
        """Returns messages by key: those of a run for the first batch or, if `strict`, of a check for all datasets."""
        if strict:
            self.evaluate()
        elif self.fits:
            check_samples(self.stage, self.problems)
        try:
            self.problems.raise_if_any()
        except RecipeError as error:
            return {problem.key: problem.message for problem in error.problems}
        return {}

    def deal(self, world: World = ALONE) -> Dealt:
        """Assigns the data to ranks."""
        self.stage = dealt = deal(self.stage, world)
        return dealt


def staged(source: Any, *sets: str, ranks: int = 1, device: str = "cpu", meta: bool = True, **options: Any) -> Staged:
    """Builds and checks a recipe for `ranks` ranks; `options` are those of `choose`."""
    registry = Registry.installed()
    loaded = load_recipe(source, sets=sets, registry=registry)
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=ranks, device=device, **options)
    check("chosen", chosen, problems)
    built = build(chosen, problems, meta=meta)
    return Staged(built, problems, check_built(built, problems))


def dealt(source: Any, world: World = ALONE, *, sets: Sequence[str] = (), **options: Any) -> Dealt:
    """Builds a recipe that has no errors, and assigns its data to ranks."""
    found = staged(source, *sets, ranks=world.global_ranks.size, meta=False, **options)
    found.problems.raise_if_any()
    return found.deal(world)


def chosen_with(
    train: TrainSection, *, ranks: int = 1, device: str = "cpu", recipe: Mapping[str, Any] | None = None, **more: Any
) -> Chosen:
    """Returns a stub of `Chosen` with one `[train]`, for checks that read little else."""
    sections: Any = {"optimizer": SimpleNamespace(updates={}, groups={}, use="sgd"), **(recipe or {})}
    stand_in = SimpleNamespace(train=train, **sections)
    return SimpleNamespace(  # type: ignore[return-value]
        recipe=stand_in, data_ranks=ranks, ranks=ranks, device=device, trains=True, **more
    )
