"""Contract of features: parts of training that some runs use, which the loop reaches by entry points.

The entry-point group `ddpforge.feature` has classes, or lists of classes in their order; ddpforge's own features come
in by it, too. The methods that the features of a run override are collected once: a run without features calls none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeAlias, TypeVar

from ddpforge.components.hooks import found as installed
from ddpforge.errors import PluginError
from ddpforge.interfaces import Callback

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpforge.data import MicroBatch
    from ddpforge.data.batch_assignment import Divider
    from ddpforge.data.fetching import Reader
    from ddpforge.interfaces import (
        AuxiliaryModule,
        BatchSampler,
        CanonicalState,
        Replica,
        SavedTensor,
        Task,
        TensorShard,
        Total,
        World,
    )
    from ddpforge.recipe.schema import TrainSection
    from ddpforge.training.problems import Problems
    from ddpforge.training.stages import Built, Chosen, Dealt

__all__ = [
    "Assembled",
    "Feature",
    "GlobalBatch",
    "OwnedState",
    "PassTotals",
    "TakesSteps",
    "change_built",
    "declared_modules",
    "feature_classes",
    "features_of",
    "join_data",
    "merged",
    "methods_of",
    "only_one",
    "rework",
]

X = TypeVar("X")

GlobalBatch: TypeAlias = "tuple[MicroBatch, Iterable[MicroBatch]]"
"""This rank's first micro-batch of a global batch, and all its micro-batches."""

PassTotals: TypeAlias = "Callable[[Tensor, Any, Any], Mapping[str, Total]]"
"""Returns further totals of a pass, from its loss, its outputs and its batch."""


class TakesSteps(Protocol):
    """Takes steps of the weights: a stepper, or the object of a feature around one or several steppers."""

    def train_step(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int = 0
    ) -> tuple[dict[str, Total], Tensor]:
        """Takes a step on a global batch; returns the totals of the metrics, and the norm of the gradient (0-d)."""


@dataclass(frozen=True, kw_only=True)
class Assembled:
    """Run as it is assembled, for the features: its parts, and the replica that the strategy has made of the model.

    `begins` is False if a checkpoint will be restored; `trains` is False in an evaluation.
    """

    parts: Dealt
    world: World
    replica: Replica
    begins: bool
    trains: bool


class Feature:
    """Part of training that some runs use. Every rank has the same features; their methods may be collective.

    A subclass overrides the methods that it needs; the others are never called.
    """

    # ------------------------------------------------------------------------------------------ data
    @staticmethod
    def join(chosen: Chosen, data: dict[str, Any], problems: Problems) -> None:
        """Changes the built datasets of training, by their keys below `data`, to one with the key "train".

        Called on the class, as all methods for data. Adds the errors of data that cannot be joined to `problems`.
        """

    @staticmethod
    def reader(data: Any) -> Reader | None:
        """Returns the function that reads a kind of data; None for others, such as map-style datasets.

        Raises PluginError for data of this kind that cannot be used.
        """
        return None

    @staticmethod
    def order(chosen: Chosen, data: Any) -> BatchSampler | None:
        """Returns the order of training data that the recipe's sampler does not order; None for other data."""
        return None

    @staticmethod
    def divider(chosen: Chosen, data: Any) -> Divider | None:
        """Returns the object that divides each step of the training data into micro-batches; None for equal ones."""
        return None

    # ------------------------------------------------------------------------------------------ once
    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature of a run; None if the run does not use it."""
        return None

    @staticmethod
    def declared_modules(task: Task, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        """Returns the modules that a task uses besides the bare `model`, by name. Called on the class."""
        return {}

    @staticmethod
    def built(model: nn.Module, train: TrainSection) -> None:
        """Changes a model as soon as it is built and its weights are frozen. Called on the class."""

    @staticmethod
    def rework(parts: Built, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Changes the model as the recipe sets it, before the strategy wraps it; returns it, or its replacement.

        Called on the class. `blocks` are the repeated blocks of the model.
        """
        return model

    def callbacks(self) -> Mapping[str, Callback]:
        """Returns callbacks of the feature by name, which are called before those of the recipe."""
        return {}

    def stateful_modules(self) -> Sequence[nn.Module]:
        """Returns the modules besides the model whose buffers forward passes change."""
        return ()

    def start(self, stateful: nn.Module) -> None:
        """Called before training; `stateful` is the model, together with the `stateful_modules` of all features."""

    # ------------------------------------------------------------------------------------------ each step
    def around_stepper(self, stepper: TakesSteps) -> TakesSteps:
        """Returns the object that takes the steps of one update."""
        return stepper

    def around_update(self, optimizer: Optimizer) -> Callable[[Callable[[], Any]], Tensor] | None:
        """Returns a function that updates the weights and returns the norm of the gradient; None for `replica.step`.

        It receives a function that computes new gradients of the same micro-batches.
        """
        return None

    def combine(self, steppers: Mapping[str, TakesSteps], draw: Callable[[], GlobalBatch]) -> TakesSteps:
        """Returns the object that takes steps of several updates; `draw` returns the next global batch of a step."""
        raise NotImplementedError

    def after_draw(self, first: MicroBatch) -> None:
        """Called after a step with this rank's first micro-batch of each global batch; in evaluations with each one."""

    def before_pass(self, micro: MicroBatch) -> None:
        """Called before the forward pass of each micro-batch."""

    def after_passes(self) -> None:
        """Called after the last pass of an update, before the weights change."""

    def pass_totals(self, micro: MicroBatch) -> PassTotals | None:
        """Returns a function that returns further totals of a pass of a step that logs; None if there are none."""
        return None

    def after_step(self) -> bool:
        """Called after the update of each step, until it returns False."""
        return False

    def row(self, step: int) -> Mapping[str, float]:
        """Returns columns for the row of a step that logs."""
        return {}

    # ------------------------------------------------------------------------------------------ agreement of ranks
    def totals(self) -> Mapping[str, float]:
        """Returns numbers of this rank whose means over all ranks `take` receives; names begin with `?`."""
        return {}

    def take(self, means: dict[str, float], step: int) -> None:
        """Removes its numbers from the means over ranks, and may raise an error on every rank."""

    # ------------------------------------------------------------------------------------------ checkpoints
    def before_save(self) -> None:
        """Called before each checkpoint."""

    def saved_state(self, state: CanonicalState[Tensor | TensorShard]) -> CanonicalState[Any]:
        """Returns the state for a checkpoint. Collective."""
        return state

    def loaded_state(self, state: CanonicalState[SavedTensor]) -> CanonicalState[SavedTensor]:
        """Returns the state of a checkpoint in the form that the replica restores. Collective."""
        return state


class OwnedState(Callback):
    """State of a feature in checkpoints, under the name of a callback; it belongs to the task of the recipe."""

    def restore(self, state: Mapping[str, Any] | None, is_another: Callable[[], bool]) -> None:
        """Restores the state; None if the checkpoint has none.

        `is_another` returns True, and logs it, if the checkpoint was saved with another task.
        """
        raise NotImplementedError


def feature_classes() -> Iterator[type[Feature]]:
    """Yields the classes of all installed features, in their order."""
    for hook in installed("feature"):
        loaded = hook.load()
        for one in loaded if isinstance(loaded, list | tuple) else [loaded]:
            if not (isinstance(one, type) and issubclass(one, Feature)):
                raise hook.error("is not a subclass of `Feature`, nor a list of them")
            yield one


def join_data(chosen: Chosen, data: dict[str, Any], problems: Problems) -> None:
    """Changes built datasets of training to one, as all features do; see `Feature.join`."""
    for one in feature_classes():
        one.join(chosen, data, problems)


def declared_modules(task: Task, model: nn.Module) -> dict[str, AuxiliaryModule]:
    """Returns the modules that the features of a task declare, by name."""
    return merged([one.declared_modules(task, model) for one in feature_classes()], "module")


def change_built(model: nn.Module, train: TrainSection) -> None:
    """Changes a model that has just been built as all features do, in their order."""
    for one in feature_classes():
        one.built(model, train)


def rework(parts: Built, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
    """Returns the model as all features rework it, in their order."""
    for one in feature_classes():
        model = one.rework(parts, model, blocks)
    return model


def features_of(run: Assembled) -> list[Feature]:
    """Returns the features that a run uses."""
    return [feature for one in feature_classes() if (feature := one.of(run)) is not None]


def methods_of(features: Iterable[Feature | type[Feature]], method: str) -> tuple[Any, ...]:
    """Returns the `method` of each feature, or of each class, that overrides it."""
    kinds = [(one, one if isinstance(one, type) else type(one)) for one in features]
    return tuple(getattr(one, method) for one, kind in kinds if getattr(kind, method) is not getattr(Feature, method))


def only_one(features: Iterable[Feature | type[Feature]], method: str, *arguments: Any) -> Any:
    """Returns the result of `method` of the only feature that returns one; None if none does.

    Raises PluginError if several do: each would replace the other.
    """
    found = [result for call in methods_of(features, method) if (result := call(*arguments)) is not None]
    if len(found) > 1:
        names = " and ".join(getattr(one, "__name__", type(one).__name__) for one in found)
        raise PluginError(f"two features replace the same part of a step (`{method}`): {names}")
    return found[0] if found else None


def merged(parts: Iterable[Mapping[str, X]], noun: str) -> dict[str, X]:
    """Returns the entries of all `parts`; raises PluginError if two have the same name."""
    found: dict[str, X] = {}
    for part in parts:
        if taken := found.keys() & part.keys():
            raise PluginError(f"two features have a {noun} with the name `{min(taken)}`")
        found |= part
    return found
