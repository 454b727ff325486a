"""The stages of a run before it trains: what its recipe chooses, what is built of that, and the batches of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ddpforge.components.registry import Registry
from ddpforge.interfaces import BatchSampler, Beside, Callback, Schedule, Strategy, Task, Tracker
from ddpforge.recipe import LoadedRecipe, Recipe
from ddpforge.recipe.plan import BatchPlan, Plan
from ddpforge.recipe.schema import Component, TurnComponent

if TYPE_CHECKING:
    from torch import nn

    from ddpforge.data import Batches
    from ddpforge.training.contract import Size

__all__ = ["MISSING", "Built", "Chosen", "Dealt", "NotBuilt", "key_of"]


class NotBuilt(Exception):
    """A component is used that could not be built, which is a problem that has been noted."""


class _Missing:
    """Stands for a component that could not be built, or whose code is not imported: any use of it raises NotBuilt."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotBuilt(name)


MISSING: Any = _Missing()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The components that a recipe names, but for data, model and schedule: nothing large has been built.

    If nothing is trained (not `trains`), there are neither optimizer nor trackers, `batch` is MISSING, and evaluation
    sets are those that `only` names, or all. `device` is "cpu" or "cuda"; None stands for what this machine has.
    """

    loaded: LoadedRecipe  # with the direction of metrics, as the task declares it
    registry: Registry
    ranks: int
    device: str | None
    trains: bool
    only: Sequence[str]
    resumes: bool  # whether there are checkpoints to resume from, so that initial weights do not matter
    strategy: Strategy
    data_ranks: int  # ranks that see different data
    task: Task
    callbacks: Mapping[str, Callback]
    trackers: Mapping[str, Tracker]
    turns: Mapping[str, TurnComponent]  # in the order of the task
    batch: BatchPlan
    other_layout: str = ""  # why a run is evaluated under another strategy than its own

    @property
    def recipe(self) -> Recipe:
        """The recipe."""
        return self.loaded.recipe

    def evaluations(self) -> dict[str, Component]:
        """Returns the evaluation sets by name, less those that were not asked for."""
        sets = self.recipe.data.evaluations
        return {name: component for name, component in sets.items() if not self.only or name in self.only}

    @classmethod
    def of(cls, earlier: Chosen, **more: Any) -> Self:
        """Returns this stage, made of the `earlier` one and what it adds."""
        return cls(**{one.name: getattr(earlier, one.name) for one in fields(earlier)} | more)


@dataclass(frozen=True, kw_only=True)
class Built(Chosen):
    """The components with data, model and schedules, the same on every rank.

    `data` has the datasets by the recipe's key below `data`: "train", "eval", "eval.NAME".
    """

    data: Mapping[str, Any]
    order: BatchSampler | None  # of the training data; None for a stream, which has its own
    plan: Plan
    schedules: Mapping[str, Schedule]  # of turns that have one of their own, and of all others: ""
    model: nn.Module
    size: Size
    beside: Mapping[str, Beside]  # modules that the task uses beside the model


@dataclass(frozen=True, kw_only=True)
class Dealt(Built):
    """The components with the batches of one rank: its part of the training data, and of each evaluation set by name.

    `compares` says that the first loss is still to be compared with those of its halves.
    """

    training: Batches
    evaluation: Mapping[str, Batches] = field(default_factory=dict)
    compares: bool = True


def key_of(name: str) -> str:
    """Returns the recipe's key of an evaluation set, below `data`."""
    return f"eval.{name}" if name else "eval"
