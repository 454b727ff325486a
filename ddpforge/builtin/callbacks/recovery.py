"""Lowers the learning rate for some steps after a spike of the loss, or after training went back."""

import logging
import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Annotated, Any

from pydantic import Field

from ddpforge.interfaces import Callback, GoBack, StepInfo

logger = logging.getLogger("ddpforge")

Steps = Annotated[int, Field(ge=1, le=2**31, description="Number of steps in which the rate rises again.")]
Lowest = Annotated[float, Field(ge=0, lt=1, description="Initial factor on the rate.")]


class _Rise:
    """Factor that falls to `lowest` after step `since`, and rises linearly to 1 within `steps` steps."""

    def __init__(self, lowest: float, steps: int) -> None:
        self._lowest, self._steps = lowest, steps
        self.since: int | None = None  # the factor fell after this step
        self.step = 0  # the newest step

    def factor(self) -> float:
        """Returns the factor of the next step."""
        if self.since is None:
            return 1.0
        return min(1.0, self._lowest + (1.0 - self._lowest) * (self.step + 1 - self.since) / self._steps)


class WarmupAfterRollback(Callback):
    """Lowers the learning rate whenever training went back to a checkpoint, and raises it again over `steps` steps.

    For `train.on_nonfinite = "rollback"`: with the same rate and almost the same samples, training may diverge again.
    """

    def __init__(self, steps: Steps = 100, min_lr_ratio: Lowest = 0.0) -> None:
        self._rise = _Rise(min_lr_ratio, steps)

    def lr_factor(self) -> float:
        """Returns 1, or less for some steps after a rollback."""
        return self._rise.factor()

    def on_step(self, info: StepInfo) -> None:
        """Records the step."""
        self._rise.step = info.step

    def on_rollback(self, step: int) -> None:
        """Lowers the rate after `step`."""
        self._rise.since, self._rise.step = step, step

    def state(self) -> Mapping[str, int | None]:
        """Returns the step of the last rollback, and the newest step."""
        return {"since": self._rise.since, "step": self._rise.step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._rise.since, self._rise.step = state["since"], state["step"]


class SpikeGuard(Callback):
    """Undoes the updates that led to a spike of the training loss, and lowers the learning rate for some steps.

    A spike is a loss of more than `ratio` times the median of the last `window` rows. Training then goes back to the
    newest checkpoint and skips the steps since the previous row; skipped steps count as done. The rate falls to
    `min_lr_ratio` times its normal value, and rises again over `steps` steps. With `rollback = false` training does not
    go back, and only the rate falls.

    A spike is detected when its row is logged. Therefore `track.every` is the maximum delay, and the number of skipped
    steps. A loss that is not finite never changes the weights, see `train.on_nonfinite`.
    """

    def __init__(
        self,
        ratio: Annotated[float, Field(gt=1, le=1e6, description="Minimum ratio of a spike to the median.")] = 2.0,
        window: Annotated[int, Field(ge=3, le=10_000, description="Number of rows in the median.")] = 20,
        min_lr_ratio: Lowest = 0.1,
        steps: Steps = 100,
        rollback: Annotated[bool, Field(description="Go back to the newest checkpoint, and skip these steps.")] = True,
    ) -> None:
        self._ratio, self._window, self.goes_back = ratio, window, rollback
        self._losses: deque[float] = deque(maxlen=window)
        self._rise = _Rise(min_lr_ratio, steps)
        self._row = 0  # step of the newest row
        self._asked = False  # a request to go back is pending

    def lr_factor(self) -> float:
        """Returns 1, or less for some steps after a spike."""
        return self._rise.factor()

    def on_step(self, info: StepInfo) -> GoBack | None:
        """Compares the loss with the median if a row was logged; returns `GoBack` after a spike."""
        self._rise.step = info.step
        loss = info.metrics.get("train/loss", math.nan)
        if not math.isfinite(loss):
            return None
        since, self._row = self._row, info.step
        usual = median(self._losses) if len(self._losses) == self._window else 0.0
        self._losses.append(loss)  # a spike too: the loss may have risen permanently
        if not loss > self._ratio * usual > 0:
            return None
        why = f"the loss of step {info.step} is {loss:.4g}, usual is {usual:.4g}"
        if self.goes_back:
            self._asked = True
            return GoBack(range(since + 1, info.step + 1), why)
        self._rise.since = info.step
        logger.warning("%s; the learning rate is lower for some steps", why)
        return None

    def on_rollback(self, step: int) -> None:
        """Lowers the rate if this callback requested the rollback."""
        if self._asked:
            self._rise.since, self._rise.step, self._asked = step, step, False

    def state(self) -> Mapping[str, int | float | None]:
        """Returns the steps of the last spike, the newest step and the newest row, and the losses of the median."""
        losses = {f"loss {number}": loss for number, loss in enumerate(self._losses)}
        return {"since": self._rise.since, "step": self._rise.step, "row": self._row, **losses}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._rise.since, self._rise.step, self._row = state["since"], state["step"], state["row"]
        numbers = (state[f"loss {number}"] for number in range(len(state) - 3))
        self._losses = deque(numbers, maxlen=self._window)
