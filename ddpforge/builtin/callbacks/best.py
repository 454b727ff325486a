"""Best value of a metric, for callbacks with a patience."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from ddpforge.errors import PluginError
from ddpforge.interfaces import lower_is_better

__all__ = ["Best", "Metric", "MinDelta", "Mode"]

Metric = Annotated[str, Field(min_length=1, description='An evaluation metric, e.g. "eval/loss".')]
MinDelta = Annotated[
    float, Field(ge=0, le=1e9, description="Minimum improvement of a new best value, in the metric's unit.")
]
Mode = Annotated[
    Literal["min", "max"] | None,
    Field(description="Direction that is better; absent: as the metric declares, or derived from its name."),
]


class Best:
    """Best value of a metric so far, and the number of evaluations since then.

    A value that is not finite is never a new best.

    Raises:
        ValueError: The metric is not an evaluation metric, or `mode` is absent and the metric's name does not
            determine if lower or higher is better.
    """

    def __init__(self, metric: str, mode: Literal["min", "max"] | None, min_delta: float) -> None:
        self.value: float | None = None
        self.waited = 0
        if not metric.startswith("eval/"):
            raise ValueError(f"metric: {metric} is not an evaluation metric; their names begin with eval/")
        self._metric, self._min_delta = metric, min_delta
        self._sign = _sign(metric, mode)

    def look(self, metrics: Mapping[str, float], who: str) -> None:
        """Updates the best value after an evaluation; raises PluginError if the evaluation lacks the metric.

        The error message names the callback.
        """
        if self._metric not in metrics:
            raise PluginError(
                f"{who} watches {self._metric!r}, but no evaluation reports it",
                hints=[f"one of: {', '.join(sorted(metrics))}"],
            )
        value = metrics[self._metric]
        if math.isfinite(value) and (self.value is None or self._sign * (value - self.value) > self._min_delta):
            self.value, self.waited = value, 0
        else:
            self.waited += 1

    def state(self) -> dict[str, int | float | None]:
        """Returns the best value so far, and the number of evaluations since then."""
        return {"best": self.value, "waited": self.waited}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state`."""
        self.value, self.waited = state["best"], state["waited"]


def _sign(metric: str, mode: str | None) -> float:
    lower = mode == "min" if mode else lower_is_better(metric)
    if lower is None:
        raise ValueError(
            f'cannot infer from the name if less or more of "{metric}" is better: set mode = "min" or "max"'
        )
    return -1.0 if lower else 1.0
