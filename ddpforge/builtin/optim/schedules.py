"""Learning-rate schedules: functions from the step to the factor on the recipe's learning rate.

Each takes the run's `Horizon`, T steps long, and returns `factor(s)`, s being 0 at the first optimizer step.
Nothing else enters: not the number of ranks, nor of micro-batches, nor a resume. Every schedule begins with
W = `warmup` steps in which the factor is (s + 1) / W; its own formula holds from step W on. A step beyond the
run gets the last factor.
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

_Warmup = Annotated[Duration, Field(description="How long to rise linearly to the full learning rate.")]
_MinLRRatio = Annotated[
    float, Field(ge=0, le=1, description="The factor at the last step, a fraction of the learning rate.")
]
_NONE = Duration(0, "st")


def constant(horizon: Horizon, *, warmup: _Warmup = _NONE) -> Schedule:
    """1 at every step. Raises ValueError when the warm-up is not shorter than the run."""
    return _after_warmup(_warmup_steps(horizon, warmup), lambda s: 1.0)


def linear(horizon: Horizon, *, warmup: _Warmup = _NONE, min_lr_ratio: _MinLRRatio = 0.0) -> Schedule:
    """1 - (1 - min_lr_ratio) · p with p = (s - W) / (T - 1 - W): 1 at step W, `min_lr_ratio` at the last step.

    Raises ValueError when the warm-up is not shorter than the run, or the run's length is a wall time.
    """
    return _fall(horizon, warmup, min_lr_ratio, lambda p: 1 - p)


def cosine(horizon: Horizon, *, warmup: _Warmup = _NONE, min_lr_ratio: _MinLRRatio = 0.0) -> Schedule:
    """r + (1 - r) · (1 + cos πp) / 2 with r = `min_lr_ratio` and p as for `linear`: 1 at step W, r at the last step.

    That of Loshchilov and Hutter, "SGDR" (2017), without restarts. Raises ValueError when the warm-up is not
    shorter than the run, or the run's length is a wall time.
    """
    return _fall(horizon, warmup, min_lr_ratio, lambda p: (1 + math.cos(math.pi * p)) / 2)


def step(
    horizon: Horizon,
    *,
    milestones: Annotated[
        Sequence[Duration],
        Field(min_length=1, max_length=1000, description="When, from the start, to multiply by `gamma`."),
    ],
    gamma: Annotated[float, Field(gt=0, lt=1, description="What each milestone multiplies the factor by.")] = 0.1,
    warmup: _Warmup = _NONE,
) -> Schedule:
    """gamma to the power of the milestones reached; one of m steps is reached at step m.

    Milestones beyond the run's end are never reached, which a warning says. Raises ValueError when milestones do not
    increase or lie within the warm-up, and when the warm-up is not shorter than the run.
    """
    first = _warmup_steps(horizon, warmup)
    steps = [horizon.steps(milestone) for milestone in milestones]
    if any(later <= earlier for earlier, later in pairwise(steps)):
        raise ValueError(f"milestones: they must increase, but in steps they are {steps}")
    if steps[0] < max(1, first):
        raise ValueError(f"milestones: the first is step {steps[0]}, but must be {max(1, first)} or later")
    if horizon.total is not None and steps[-1] >= horizon.total:
        late = ", ".join(str(one) for one in steps if one >= horizon.total)
        log.warning("schedule.milestones: the run ends at step %d, and does not reach %s", horizon.total, late)
    return _after_warmup(first, lambda s: gamma ** bisect_right(steps, s))


def wsd(
    horizon: Horizon,
    *,
    decay: Annotated[Duration, Field(description="How long, at the end of the run, to fall to `min_lr_ratio`.")],
    shape: Annotated[
        Literal["linear", "1-sqrt"], Field(description="How to fall; 1-sqrt is steep at first.")
    ] = "linear",
    min_lr_ratio: _MinLRRatio = 0.0,
    warmup: _Warmup = _NONE,
) -> Schedule:
    """Warm-up, stable, decay: 1 up to the last D = `decay` steps, min_lr_ratio + (1 - min_lr_ratio) · (1 - f) in these.

    f is p, or √p for "1-sqrt", with p = (s - (T - D) + 1) / D, which is 1 at the last step. The shapes are of
    Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).

    Raises ValueError when warm-up and decay together are longer than the run, the decay is no step long, or
    the run's length is a wall time.
    """
    total, first, length = _total(horizon), _warmup_steps(horizon, warmup), horizon.steps(decay)
    if not 1 <= length <= total - first:
        raise ValueError(
            f"the decay takes {length} steps, but must take from 1 to {total - first}: what the run has left"
            " after its warm-up"
        )

    def factor(s: int) -> float:
        p = min(1.0, max(0.0, (s - (total - length) + 1) / length))
        return min_lr_ratio + (1 - min_lr_ratio) * (1 - (p if shape == "linear" else math.sqrt(p)))

    return _after_warmup(first, factor)


# ---------------------------------------------------------------------------------------------- parts
def _fall(horizon: Horizon, warmup: Duration, min_lr_ratio: float, shape: Callable[[float], float]) -> Schedule:
    """From 1 to `min_lr_ratio` along `shape`, which falls from 1 to 0 while p rises from 0 to 1."""
    first = _warmup_steps(horizon, warmup)
    span = max(1, _total(horizon) - 1 - first)  # a lone step after the warm-up gets p = 0
    return _after_warmup(first, lambda s: min_lr_ratio + (1 - min_lr_ratio) * shape(min(1.0, (s - first) / span)))


def _after_warmup(steps: int, schedule: Schedule) -> Schedule:
    return lambda s: (s + 1) / steps if s < steps else schedule(s)


def _warmup_steps(horizon: Horizon, warmup: Duration) -> int:
    steps = horizon.steps(warmup)
    if horizon.total is not None and steps >= horizon.total:
        raise ValueError(f"the warm-up of {steps} steps is not shorter than the run of {horizon.total} steps")
    return steps


def _total(horizon: Horizon) -> int:
    if horizon.total is None:
        raise ValueError(
            "this schedule needs the run's length in steps, but train.length is a wall time;"
            " set train.length in epochs or steps, or use the schedule constant or step"
        )
    return horizon.total
