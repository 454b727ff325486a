"""Stages of a run before it trains: its chosen components, its built components, and the batches of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NoReturn, Self

from ddpforge.components.registry import Registry
from ddpforge.interfaces import AuxiliaryModule, BatchSampler, Callback, Schedule, Strategy, Task, Tracker
from ddpforge.recipe import LoadedRecipe, Recipe
from ddpforge.recipe.run_plan import BatchPlan, RunPlan
from ddpforge.recipe.schema import Component, UpdateComponent
from ddpforge.training.data_names import DataNames

if TYPE_CHECKING:
    from torch import nn

    from ddpforge.data import Batches
    from ddpforge.data.batch_assignment import Divider
    from ddpforge.training.contract import ParameterCount

__all__ = ["MISSING", "Built", "Chosen", "Dealt", "NotBuilt", "key_of", "source_components"]


class NotBuilt(Exception):
    """Raised when a component is used that could not be built; that problem is recorded already."""


class _Missing:
    """Placeholder for a component that could not be built or was not imported: any use raises NotBuilt."""

    def __getattr__(self, name: str) -> NoReturn:
        raise NotBuilt(name)


MISSING: Any = _Missing()


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Components that a recipe names, without data, model and schedules: nothing large is built.

    If nothing is trained (not `trains`), there are neither optimizer nor trackers, and `batch` is MISSING. `only` names
    the evaluation sets to use; if it is empty, all are used. `device` is the name of a kind of devices, such as "cuda";
    None is for that of this machine.
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
    updates: Mapping[str, UpdateComponent]  # in the order of the task
    batch: BatchPlan
    other_layout: str = ""  # why a run is evaluated under another strategy than its own

    @property
    def recipe(self) -> Recipe:
        """Returns the recipe."""
        return self.loaded.recipe

    def evaluations(self) -> dict[str, Component]:
        """Returns the evaluation sets by name, only the ones in `only` unless it is empty."""
        sets = self.recipe.data.evaluations
        return {name: component for name, component in sets.items() if not self.only or name in self.only}

    @classmethod
    def of(cls, earlier: Chosen, **more: Any) -> Self:
        """Returns this stage, with the fields of the `earlier` one and `more`."""
        return cls(**{one.name: getattr(earlier, one.name) for one in fields(earlier)} | more)


@dataclass(frozen=True, kw_only=True)
class Built(Chosen):
    """Components with data, model and schedules, the same on every rank.

    `data` has the datasets by the recipe's key below `data`: "train", "eval", "eval.NAME".
    """

    data: Mapping[str, Any]
    sampler: BatchSampler | None  # of the training data; None for a stream, which has its own
    plan: RunPlan
    schedules: Mapping[str, Schedule]  # by update; "" is for updates without their own
    value_schedules: Mapping[str, Schedule]  # of the optimizer's other options, by name
    model: nn.Module
    size: ParameterCount
    auxiliary: Mapping[str, AuxiliaryModule]  # the task's auxiliary modules
    limit: Divider | None = None  # divides the samples of a step by their lengths
    names: DataNames = field(default_factory=DataNames)  # of the training data


@dataclass(frozen=True, kw_only=True)
class Dealt(Built):
    """Components with the batches of one rank: its part of the training data, and of each evaluation set by name.

    `compares`: the first step must still compare its loss with the losses of its halves.
    """

    training: Batches
    evaluation: Mapping[str, Batches] = field(default_factory=dict)
    compares: bool = True


def key_of(name: str) -> str:
    """Returns the recipe's key of an evaluation set, below `data`."""
    return f"eval.{name}" if name else "eval"


def source_components(recipe: Recipe) -> dict[str, Component]:
    """Returns the training data by the recipe's key below `data`: "train", or "train.NAME" for each source."""
    return {f"train.{name}" if name else "train": component for name, component in recipe.data.sources.items()}
