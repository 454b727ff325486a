"""Learning-rate schedules: functions from the step to the factor on the recipe's learning rate.

Each takes the run's `Horizon` of T steps, and returns `factor(s)`; s is 0 at the first optimizer step. The factor
depends on nothing else: not on the world size, gradient accumulation or a resume. Every schedule starts with
W = `warmup` steps in which the factor is (s + 1) / W. Its own formula applies from step W on. Steps after the end of
the run have the last factor.
"""

import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field

from ddpforge.interfaces import Duration, Horizon, Schedule

log = logging.getLogger("ddpforge")

_Warmup = Annotated[Duration, Field(description="Duration of the linear rise to the full learning rate.")]
_MinLRRatio = Annotated[
    float, Field(ge=0, le=1, description="Factor at the last step, a fraction of the learning rate.")
]
_NONE = Duration(0, "st")


def constant(horizon: Horizon, *, warmup: _Warmup = _NONE) -> Schedule:
    """Returns the factor 1 at every step. Raises ValueError if the warm-up is not shorter than the run."""
    return _after_warmup(_warmup_steps(horizon, warmup), lambda s: 1.0)


def linear(horizon: Horizon, *, warmup: _Warmup = _NONE, min_lr_ratio: _MinLRRatio = 0.0) -> Schedule:
    """Returns 1 - (1 - min_lr_ratio) · p with p = (s - W) / (T - 1 - W): 1 at step W, `min_lr_ratio` at the last step.

    Raises ValueError if the warm-up is not shorter than the run, or the run's length is a wall time.
    """
    return _fall(horizon, warmup, min_lr_ratio, lambda p: 1 - p)


def cosine(horizon: Horizon, *, warmup: _Warmup = _NONE, min_lr_ratio: _MinLRRatio = 0.0) -> Schedule:
    """Returns r + (1 - r) · (1 + cos πp) / 2 with r = `min_lr_ratio` and p as for `linear`: 1 at step W, r at the end.

    Schedule of Loshchilov and Hutter, "SGDR" (2017), without restarts. Raises ValueError if the warm-up is not
    shorter than the run, or the run's length is a wall time.
    """
    return _fall(horizon, warmup, min_lr_ratio, lambda p: (1 + math.cos(math.pi * p)) / 2)


def step(
    horizon: Horizon,
    *,
    milestones: Annotated[
        Sequence[Duration],
        Field(
            min_length=1,
            max_length=1000,
            description="Durations from the start, at which the factor is multiplied by `gamma`.",
        ),
    ],
    gamma: Annotated[float, Field(gt=0, lt=1, description="Multiplier of the factor at each milestone.")] = 0.1,
    warmup: _Warmup = _NONE,
) -> Schedule:
    """Returns gamma to the power of the number of reached milestones; a milestone of m steps is reached at step m.

    Logs a warning for milestones after the end of the run.

    Raises:
        ValueError: Milestones do not increase or are within the warm-up, or the warm-up is not shorter than the run.
    """
    first = _warmup_steps(horizon, warmup)
    steps = [horizon.steps(milestone) for milestone in milestones]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"milestones: must increase, but in steps they are {steps}")
    if steps[0] < max(1, first):
        raise ValueError(f"milestones: the first is step {steps[0]}, but it must be step {max(1, first)} or later")
    if horizon.total is not None and steps[-1] >= horizon.total:
        late = ", ".join(str(one) for one in steps if one >= horizon.total)
        log.warning("schedule.milestones: the run ends at step %d, before the milestones %s", horizon.total, late)
    return _after_warmup(first, lambda s: gamma ** bisect_right(steps, s))


def wsd(
    horizon: Horizon,
    *,
    decay: Annotated[Duration, Field(description="Duration of the decay to `min_lr_ratio` at the end of the run.")],
    shape: Annotated[
        Literal["linear", "1-sqrt"], Field(description="Shape of the decay; 1-sqrt is steep at first.")
    ] = "linear",
    min_lr_ratio: _MinLRRatio = 0.0,
    warmup: _Warmup = _NONE,
) -> Schedule:
    """Returns the warmup-stable-decay factor: 1 before the last D = `decay` steps, then r + (1 - r) · (1 - f).

    r is `min_lr_ratio`.

    f is p, or √p for "1-sqrt", with p = (s - (T - D) + 1) / D, which is 1 at the last step. See Hägele et al.,
    "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).

    Raises:
        ValueError: Warm-up and decay together are longer than the run, the decay has no step, or the run's length is a
            wall time.
    """
    total, first, length = _total(horizon), _warmup_steps(horizon, warmup), horizon.steps(decay)
    if not 1 <= length <= total - first:
        raise ValueError(
            f"the decay has {length} steps, but must have 1 to {total - first}: the run has no more steps after its"
            " warm-up"
        )

    def factor(s: int) -> float:
        p = min(1.0, max(0.0, (s - (total - length) + 1) / length))
        return min_lr_ratio + (1 - min_lr_ratio) * (1 - (p if shape == "linear" else math.sqrt(p)))

    return _after_warmup(first, factor)


# ---------------------------------------------------------------------------------------------- parts
def _fall(horizon: Horizon, warmup: Duration, min_lr_ratio: float, shape: Callable[[float], float]) -> Schedule:
    """Returns a schedule from 1 to `min_lr_ratio` along `shape`, which falls from 1 to 0 while p rises from 0 to 1."""
    first = _warmup_steps(horizon, warmup)
    span = max(1, _total(horizon) - 1 - first)  # a single step after the warm-up has p = 0
    return _after_warmup(first, lambda s: min_lr_ratio + (1 - min_lr_ratio) * shape(min(1.0, (s - first) / span)))


def _after_warmup(steps: int, schedule: Schedule) -> Schedule:
    return lambda s: (s + 1) / steps if s < steps else schedule(s)


def _warmup_steps(horizon: Horizon, warmup: Duration) -> int:
    steps = horizon.steps(warmup)
    if horizon.total is not None and steps >= horizon.total:
        error = ValueError(f"the warm-up of {steps} steps is not shorter than the run of {horizon.total} steps")
        error.add_note('set a share of the run, e.g. schedule.warmup = "5%", or a longer train.length')
        raise error
    return steps


def _total(horizon: Horizon) -> int:
    if horizon.total is None:
        raise ValueError(
            "this schedule needs the run's length in steps, but train.length is a wall time;"
            " set train.length in epochs or steps, or use the schedule `constant` or `step`"
        )
    return horizon.total
