"""Lowers the learning rate when a metric no longer improves."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ddpforge.builtin.callbacks.best import Best, Metric, MinDelta, Mode
from ddpforge.interfaces import Callback

logger = logging.getLogger("ddpforge")


class ReduceOnPlateau(Callback):
    """Multiplies the learning rate by `factor` after `patience` evaluations in a row without a new best of `metric`.

    The schedule continues; its rate is multiplied by the product of all reductions, which is never below
    `min_lr_ratio`. After a reduction the count of evaluations starts again.
    """

    def __init__(
        self,
        metric: Metric = "eval/loss",
        patience: Annotated[
            int, Field(ge=1, le=2**31, description="Number of evaluations without a new best value before a reduction.")
        ] = 3,
        factor: Annotated[
            float, Field(gt=0, lt=1, description="Multiplier of the learning rate at each reduction.")
        ] = 0.1,
        min_lr_ratio: Annotated[
            float, Field(ge=0, lt=1, description="Lower bound of the product of all reductions.")
        ] = 0.0,
        min_delta: MinDelta = 0.0,
        mode: Mode = None,
    ) -> None:
        self.metric = metric
        self._patience, self._factor, self._min_lr_ratio = patience, factor, min_lr_ratio
        self._best = Best(metric, mode, min_delta)
        self._now = 1.0

    def lr_factor(self) -> float:
        """Returns the product of all reductions."""
        return self._now

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Reduces the rate if `patience` evaluations in a row had no new best value."""
        self._best.look(metrics, "reduce_on_plateau")
        if self._best.waited < self._patience:
            return
        self._best.waited = 0
        if (lower := max(self._min_lr_ratio, self._now * self._factor)) < self._now:
            self._now = lower
            logger.info("step %d: %s is on a plateau; the learning rate is multiplied by %g", step, self.metric, lower)

    def state(self) -> Mapping[str, int | float | None]:
        """Returns the factor, the best value so far, and the number of evaluations since then."""
        return {"factor": self._now, **self._best.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._now = state["factor"]
        self._best.load_state(state)
