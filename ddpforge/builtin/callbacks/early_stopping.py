"""Ends training when a metric has stopped getting better."""

import logging
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ddpforge.errors import PluginError
from ddpforge.interfaces import Callback, lower_is_better

logger = logging.getLogger("ddpforge")


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without a new best value of `metric`.

    A value that is not finite is never a new best. Raises ValueError when `mode` is absent and neither the metric
    nor its name tells whether less or more is better.
    """

    def __init__(
        self,
        metric: Annotated[str, Field(min_length=1, description='An evaluation metric, e.g. "eval/loss".')],
        patience: Annotated[
            int, Field(ge=1, le=2**31, description="Evaluations without a new best before training stops.")
        ],
        min_delta: Annotated[
            float,
            Field(ge=0, le=1e9, description="How much better a new best must be, in the metric's unit."),
        ] = 0.0,
        mode: Annotated[
            Literal["min", "max"] | None,
            Field(description="Whether less or more is better; absent: as the metric declares or its name tells."),
        ] = None,
    ) -> None:
        self.metric = metric
        self._patience = patience
        self._min_delta = min_delta
        self._sign = _sign(metric, mode)
        self._best: float | None = None
        self._waited = 0

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        """True when the patience is at its end."""
        if self.metric not in metrics:
            raise PluginError(
                f"early_stopping watches {self.metric!r}, which no evaluation reports",
                hints=[f"one of: {', '.join(sorted(metrics))}"],
            )
        value = metrics[self.metric]
        if self._is_best(value):
            self._best, self._waited = value, 0
        else:
            self._waited += 1

        if self._waited < self._patience:
            return False
        logger.info(
            "stopping early: %d evaluations without a better %s than %s",
            self._waited,
            self.metric,
            self._best,
        )
        return True

    def state(self) -> Mapping[str, int | float | None]:
        """The best value so far, and for how many evaluations it has been."""
        return {"best": self._best, "waited": self._waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on counting where the checkpoint was."""
        self._best, self._waited = state["best"], state["waited"]

    def _is_best(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        return self._best is None or self._sign * (value - self._best) > self._min_delta


def _sign(metric: str, mode: str | None) -> float:
    lower = mode == "min" if mode else lower_is_better(metric)
    if lower is None:
        raise ValueError(f'cannot tell whether less or more of "{metric}" is better: set mode = "min" or "max"')
    return -1.0 if lower else 1.0
