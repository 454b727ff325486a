"""Callbacks, which watch a run, and the facts of each step that they are given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpforge.interfaces.regions import Part
from ddpforge.interfaces.shown import Show
from ddpforge.interfaces.state import Weights
from ddpforge.interfaces.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Callback", "GoBack", "RunContext", "StepInfo"]


@dataclass(frozen=True)
class GoBack:
    """A callback's wish that training goes back to the newest checkpoint, and on without the `steps`."""

    steps: Sequence[int]
    why: str  # for the log, as "the loss of step 7 is 9.1, usual is 2.3"


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """The facts of an optimizer step that was taken; the numbers are already reduced over ranks.

    `metrics` holds the row that was logged at this step and is empty at steps that log nothing (reading a metric
    waits for the device). `samples` counts every sample the run has trained on. `seconds` is the wall time a step
    took, averaged over the steps since the last row.
    """

    step: int
    samples: int
    lr: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The run that a callback watches.

    `model` is the bare model. Where a strategy shards, its parameters are not whole: use `weights` to read or write
    them, frozen ones too; writing into the model's own is refused where it would be lost.
    """

    model: nn.Module
    world: World
    weights: Weights
    folder: Path  # of the run
    forward: Callable[[], AbstractContextManager[Any]]  # wraps a forward pass: autocast, as in training
    show: Show  # does nothing under `ddpforge eval`, which writes nothing
    gradients: Callable[[], Mapping[str, Part]]
    """This rank's parts of the gradient by parameter name, live, laid out as those of `weights`: the mean over the
    whole step, reduced over ranks, before clipping. Only within `on_gradient`; a parameter without one is absent."""


class Callback:
    """Something that watches the run; every method does nothing by default.

    Callbacks run on every rank. What they are told is already reduced over ranks, so a decision made from it is
    the same everywhere; returning True from `on_step` or `on_eval` ends training after this step, and `GoBack` from
    `on_step` undoes it. One rank is enough: ranks exchange what callbacks want, after every step where an `on_step` is
    not declared to return None.
    """

    goes_back: bool = False
    """True of one that may return `GoBack`: there is then a checkpoint of the initial weights to go back to."""

    calls_model: bool = False
    """True of one that calls `run.model`: a strategy under which no rank has all of it refuses such a callback."""

    def on_start(self, run: RunContext) -> None:
        """Before the first step and before a checkpoint is restored."""

    def lr_factor(self) -> float:
        """Asked before every step: multiplies its learning rate. The same on every rank, and saved by `state`."""
        return 1.0

    def on_gradient(self, step: int, norm: Tensor) -> None:
        """Within a step, when the gradient is reduced and not yet clipped: `run.gradients()` has it.

        `norm` (0-d, on the device) is that of the whole gradient; where it is not finite, no update follows. Reading
        numbers waits for the device. A strategy that cannot show its gradient refuses a callback that has this method.
        """

    def on_step(self, info: StepInfo) -> bool | GoBack | None:
        """After every optimizer step."""

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        """At every step that logs: further columns for the row."""
        return {}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """After every evaluation while training: means by name, as "eval/loss" or, of a named set, "eval/NAME/loss"."""

    def evaluating(self) -> AbstractContextManager[None]:
        """Wraps every evaluation, e.g. to swap in averaged weights; must restore them even when it raises."""
        return nullcontext()

    def while_evaluating(self, step: int) -> Mapping[str, float]:
        """After the evaluation sets, within `evaluating` of all callbacks: further metrics, "x" becoming "eval/x".

        The model is in evaluation mode, without gradients, and has the weights that are evaluated. Random numbers are
        seeded, alike at every evaluation and differently on ranks that see different data. Called on every rank, and
        must return the same on each: `run.world.all.mean` makes one number of many.
        """
        return {}

    def on_rollback(self, step: int) -> None:
        """After training went back to `step`: for a gradient that was not finite, or a `GoBack`; after `load_state`."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """After a checkpoint was committed."""

    def on_end(self, error: BaseException | None) -> None:
        """After the last step, or after `ddpforge eval`; also when that failed; the last to start is told first."""

    def state(self) -> Mapping[str, Tensor | Part | int | float | str | bool | None]:
        """Returns what a checkpoint must hold so that a resumed run continues as if nothing had happened.

        A tensor is one that is the same on every rank; a part is this rank's own. No communication.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state` gave, possibly on another number of ranks; tensors arrive as `SavedTensor`s."""
