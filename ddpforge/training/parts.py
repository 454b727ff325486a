"""Holds the parts that a recipe names, as far as they are built, and what of them cannot work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from ddpforge.components.registry import Registry
from ddpforge.data import Batches
from ddpforge.interfaces import Beside, Callback, Order, Schedule, Strategy, Task, Tracker
from ddpforge.recipe import LoadedRecipe, Recipe
from ddpforge.recipe.batch import BatchPlan
from ddpforge.recipe.layers import kind_at
from ddpforge.recipe.plan import Plan
from ddpforge.recipe.schema import Component, TurnComponent
from ddpforge.training.contract import Size
from ddpforge.training.findings import Findings

__all__ = ["Parts", "key_of"]

T = TypeVar("T")


@dataclass
class Built:
    """The parts of which there is one; None is not built yet, or cannot be, which is then noted."""

    strategy: Strategy | None = None
    task: Task | None = None
    batch: BatchPlan | None = None
    plan: Plan | None = None
    model: nn.Module | None = None
    size: Size | None = None
    schedule: Schedule | None = None
    training: Batches | None = None


class Parts(Findings):
    """The parts that a recipe names: `foreseeing` makes those that cost little, `building` the others, `trying` tries.

    What cannot work is noted, and the building continues with what it does not concern, as far as `built` has it;
    `report` then raises all of it, and what comes after that may take every part as there. Where nothing `trains`,
    there are neither training data, optimizer and schedule, nor trackers; evaluation sets are those that `only` names,
    or all.
    """

    def __init__(
        self, loaded: LoadedRecipe, registry: Registry, *, trains: bool = True, only: Sequence[str] = ()
    ) -> None:
        super().__init__(loaded)
        self.registry, self.trains, self.only = registry, trains, only
        self.not_imported += [
            component.use
            for path, component in self.recipe.components().items()
            if not registry.imports(str(kind_at(path, loaded.tables)), component.use)
        ]
        self.built = Built()
        self.callbacks: dict[str, Callback] = {}
        self.trackers: dict[str, Tracker] = {}
        self.turns: Mapping[str, TurnComponent] = {}  # in the order of the task
        self.data_ranks = 1  # ranks that see different data
        self.other_layout = ""  # why a run is evaluated under another strategy than its own

        self.data: dict[str, Any] = {}  # by the recipe's key below `data`: "train", "eval", "eval.NAME"
        self.order: Order | None = None  # of the training data; None for a stream, which has its own
        self.schedules: dict[str, Schedule] = {}  # of turns that have one of their own
        self.beside: dict[str, Beside] = {}  # what the task uses beside the model
        self.fits = False  # whether the task takes model and data

        self.is_open = False  # whether the data is dealt out
        self.evaluation: dict[str, Batches] = {}  # by the set's name

    @property
    def recipe(self) -> Recipe:
        """The recipe, with what its components declare as soon as that is known."""
        return self.loaded.recipe

    def evaluations(self) -> dict[str, Component]:
        """The evaluation sets by name, less those that nobody asked for."""
        return {
            name: component
            for name, component in self.recipe.data.evaluations.items()
            if not self.only or name in self.only
        }

    # ---------------------------------------------------------------------------------------- once they are built
    @property
    def strategy(self) -> Strategy:
        """The strategy, which spreads the model over ranks."""
        return _there(self.built.strategy)

    @property
    def task(self) -> Task:
        """The task, which computes loss and metrics."""
        return _there(self.built.task)

    @property
    def batch(self) -> BatchPlan:
        """A step's batch, cut for ranks."""
        return _there(self.built.batch)

    @property
    def plan(self) -> Plan:
        """Length and cadences in steps."""
        return _there(self.built.plan)

    @property
    def model(self) -> nn.Module:
        """The model, on no rank in particular."""
        return _there(self.built.model)

    @property
    def size(self) -> Size:
        """The number of the model's parameters."""
        return _there(self.built.size)

    @property
    def schedule(self) -> Schedule:
        """The schedule, made for the plan's length."""
        return _there(self.built.schedule)

    @property
    def training(self) -> Batches:
        """This rank's part of the training data."""
        return _there(self.built.training)


def key_of(name: str) -> str:
    """The recipe's key of an evaluation set, below `data`."""
    return f"eval.{name}" if name else "eval"


def _there(part: T | None) -> T:
    assert part is not None, "parts are there after `report`"
    return part
