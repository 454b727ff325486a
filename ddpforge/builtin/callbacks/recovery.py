"""Takes the learning rate back for a while: after a spike of the loss, or after training went back."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from ddpforge.interfaces import Callback, GoBack, StepInfo

logger = logging.getLogger("ddpforge")

Steps = Annotated[int, Field(ge=1, le=2**31, description="Over how many steps the rate rises again.")]
Lowest = Annotated[float, Field(ge=0, lt=1, description="What the rate is multiplied with at first.")]


class _Rise:
    """A factor that falls to `lowest` after some step, and rises in a straight line to 1 at the step `steps` later."""

    def __init__(self, lowest: float, steps: int) -> None:
        self._lowest, self._steps = lowest, steps
        self.since: int | None = None  # the step after which it began last
        self.step = 0  # the newest one

    def factor(self) -> float:
        """That of the step after the newest one."""
        if self.since is None:
            return 1.0
        return min(1.0, self._lowest + (1.0 - self._lowest) * (self.step + 1 - self.since) / self._steps)


class WarmupAfterRollback(Callback):
    """Begins with a lower learning rate whenever training went back to a checkpoint, and raises it over some steps.

    For `train.on_nonfinite = "rollback"`: the same rate over almost the same samples may well diverge again.
    """

    def __init__(self, steps: Steps = 100, min_lr_ratio: Lowest = 0.0) -> None:
        self._rise = _Rise(min_lr_ratio, steps)

    def lr_factor(self) -> float:
        """1, or less for some steps after a rollback."""
        return self._rise.factor()

    def on_step(self, info: StepInfo) -> None:
        """Notes the step."""
        self._rise.step = info.step

    def on_rollback(self, step: int) -> None:
        """Begins."""
        self._rise.since, self._rise.step = step, step

    def state(self) -> Mapping[str, int | None]:
        """The step after which it began last."""
        return {"since": self._rise.since, "step": self._rise.step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where the checkpoint was."""
        self._rise.since, self._rise.step = state["since"], state["step"]


class SpikeGuard(Callback):
    """Undoes what a spike of the training loss did, and lowers the learning rate for a while.

    A spike is a loss of more than `ratio` times the median of the last `window` rows. Training then goes back to the
    newest checkpoint, and on without the steps since the row before, whose updates led there; they count as passed. The
    rate falls to `min_lr_ratio` times what it would be, and rises again over `steps` steps. With `rollback = false`
    only the rate falls. A spike is noticed in the row that reports it, so `track.every` is how late that may be, and
    how many steps are left out. What is not finite never reaches the weights, see `train.on_nonfinite`.
    """

    def __init__(
        self,
        ratio: Annotated[float, Field(gt=1, le=1e6, description="How far above the median a spike is.")] = 2.0,
        window: Annotated[int, Field(ge=3, le=10_000, description="Rows of which the median is taken.")] = 20,
        min_lr_ratio: Lowest = 0.1,
        steps: Steps = 100,
        rollback: Annotated[
            bool, Field(description="Go back to the newest checkpoint, and leave those steps out.")
        ] = True,
    ) -> None:
        self._ratio, self._window, self.goes_back = ratio, window, rollback
        self._losses: deque[float] = deque(maxlen=window)
        self._rise = _Rise(min_lr_ratio, steps)
        self._row = 0  # the step of the newest
        self._asked = False  # to go back

    def lr_factor(self) -> float:
        """1, or less for some steps after a spike."""
        return self._rise.factor()

    def on_step(self, info: StepInfo) -> GoBack | None:
        """Compares the loss where there is a row. A spike counts for later medians: a loss may rise for good."""
        self._rise.step = info.step
        loss = info.metrics.get("train/loss", math.nan)
        if not math.isfinite(loss):
            return None
        since, self._row = self._row, info.step
        usual = median(self._losses) if len(self._losses) == self._window else 0.0
        self._losses.append(loss)
        if not loss > self._ratio * usual > 0:
            return None
        why = f"the loss of step {info.step} is {loss:.4g}, usual is {usual:.4g}"
        if self.goes_back:
            self._asked = True
            return GoBack(range(since + 1, info.step + 1), why)
        self._rise.since = info.step
        logger.warning("%s; a lower rate for a while", why)
        return None

    def on_rollback(self, step: int) -> None:
        """Begins with the lower rate, where this is what it asked for."""
        if self._asked:
            self._rise.since, self._rise.step, self._asked = step, step, False

    def state(self) -> Mapping[str, int | float | None]:
        """The step of the last spike, and the losses of which the median is taken."""
        losses = {f"loss {number}": loss for number, loss in enumerate(self._losses)}
        return {"since": self._rise.since, "step": self._rise.step, "row": self._row, **losses}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on where the checkpoint was."""
        self._rise.since, self._rise.step, self._row = state["since"], state["step"], state["row"]
        numbers = (state[f"loss {number}"] for number in range(len(state) - 3))
        self._losses = deque(numbers, maxlen=self._window)
