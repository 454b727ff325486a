"""Callbacks, which observe a run, and the information that they receive about the run and each step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpforge.interfaces.media import LogMedia
from ddpforge.interfaces.regions import TensorShard
from ddpforge.interfaces.state import Weights
from ddpforge.interfaces.world import World

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Callback", "GoBack", "RunContext", "StepInfo"]


@dataclass(frozen=True)
class GoBack:
    """Request of a callback to return to the newest checkpoint and to skip `steps` from then on."""

    steps: Sequence[int]
    why: str  # for the log, as "the loss of step 7 is 9.1, usual is 2.3"


@dataclass(frozen=True, kw_only=True)
class StepInfo:
    """Information about a completed optimizer step. All numbers are already reduced over ranks.

    Attributes:
        samples: Number of samples that the run has trained on so far.
        seconds: Wall time per step, averaged over the steps since the last logged row.
        metrics: Row that was logged at this step; empty if the step logs nothing.
    """

    step: int
    samples: int
    lr: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Run that a callback observes.

    `model` is the bare model. Its parameters are not whole if the strategy shards them: read and write trained and
    frozen parameters through `weights`. Writing into the model's own parameters is refused if the change would be lost.
    """

    model: nn.Module
    world: World
    weights: Weights
    folder: Path  # of the run
    forward: Callable[[], AbstractContextManager[Any]]  # wraps a forward pass: autocast, as in training
    log_media: LogMedia  # does nothing under `ddpforge eval`
    gradients: Callable[[], Mapping[str, TensorShard]]
    """Returns this rank's parts of the gradient by parameter name, in the layout of `weights`, without a copy.

    The gradient is the mean over the whole step, reduced over ranks, before clipping. Call this only within
    `on_gradient`. A parameter without a gradient is absent."""


class Callback:
    """Base class of callbacks. Every method does nothing by default.

    Callbacks run on every rank. Their arguments are already reduced over ranks, so decisions based on them are the same
    on every rank. Training ends after the current step if `on_step` or `on_eval` returns True; it goes back to a
    checkpoint if `on_step` returns `GoBack`. One rank is enough, because ranks exchange these requests. For that
    they add up one number after every step, unless no `on_step` can return anything: it is declared to return None, or
    has no `return` with a value.
    """

    goes_back: bool = False
    """Set to True if `on_step` may return `GoBack`: the trainer then also saves a checkpoint of the initial weights."""

    calls_model: bool = False
    """Set to True if the callback calls `run.model`. Strategies that have no whole model on any rank refuse it."""

    def on_start(self, run: RunContext) -> None:
        """Runs before the first step, and before a checkpoint is restored."""

    def lr_factor(self) -> float:
        """Returns the factor on the learning rate of the next step; called before every step.

        It must be the same on every rank. `state` must save the values that it depends on.
        """
        return 1.0

    def on_gradient(self, step: int, norm: Tensor) -> None:
        """Runs within a step, after the gradient is reduced and before it is clipped; `run.gradients()` returns it.

        `norm` (0-d, on the device) is the norm of the whole gradient. If it is not finite, no update follows. Reading
        values waits for the device. Strategies that cannot expose gradients refuse callbacks that define this method.
        """

    def on_step(self, info: StepInfo) -> bool | GoBack | None:
        """Runs after every optimizer step."""

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        """Returns additional columns for the row; called at every step that logs."""
        return {}

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool | None:
        """Runs after every evaluation during training.

        `metrics` are means by name: "eval/loss", or "eval/NAME/loss" for a named evaluation set.
        """

    def evaluating(self) -> AbstractContextManager[None]:
        """Wraps every evaluation, e.g. to swap in averaged weights; must restore them even if evaluation raises."""
        return nullcontext()

    def while_evaluating(self, step: int) -> Mapping[str, float]:
        """Returns additional evaluation metrics; "x" is reported as "eval/x".

        Called on every rank after the evaluation sets, within `evaluating` of all callbacks. The model is in evaluation
        mode, without gradients, and has the evaluated weights. The RNGs have the same seed at every evaluation, and a
        different one on each data-parallel rank. The result must be the same on every rank: average with
        `run.world.global_ranks.reduce_metrics`.
        """
        return {}

    def on_rollback(self, step: int) -> None:
        """Runs after training went back to `step`, and after `load_state`.

        The reason is a gradient that was not finite, or a `GoBack`.
        """

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Runs after a checkpoint was committed."""

    def on_end(self, error: BaseException | None) -> None:
        """Runs after the last step or after `ddpforge eval`, in reverse order of `on_start`; also after a failure."""

    def state(self) -> Mapping[str, Tensor | TensorShard | int | float | str | bool | None]:
        """Returns the state that a checkpoint must contain, so that a resumed run continues exactly.

        Return a tensor if it is the same on every rank, and a `TensorShard` for this rank's own part. Must not
        communicate.
        """
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`, possibly on a different world size; tensors arrive as `SavedTensor`s."""
