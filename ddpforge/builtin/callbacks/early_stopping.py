"""Stops training when a metric no longer improves."""

import logging
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ddpforge.builtin.callbacks.best import Best, Metric, MinDelta, Mode
from ddpforge.interfaces import Callback

logger = logging.getLogger("ddpforge")


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without a new best value of `metric`.

    A value that is not finite is never a new best. Raises ValueError if `mode` is absent and neither the metric nor its
    name determines if lower or higher is better.
    """

    def __init__(
        self,
        metric: Metric,
        patience: Annotated[
            int,
            Field(ge=1, le=2**31, description="Number of evaluations without a new best value before training stops."),
        ],
        min_delta: MinDelta = 0.0,
        mode: Mode = None,
    ) -> None:
        self.metric = metric
        self._patience = patience
        self._best = Best(metric, mode, min_delta)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True if `patience` evaluations in a row had no new best value."""
        self._best.look(metrics, "early_stopping")
        if self._best.waited < self._patience:
            return False
        waited, value = self._best.waited, self._best.value
        logger.info("stopping early: %d evaluations without a better %s than %s", waited, self.metric, value)
        return True

    def state(self) -> Mapping[str, int | float | None]:
        """Returns the best value so far, and the number of evaluations since then."""
        return self._best.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self._best.load_state(state)
