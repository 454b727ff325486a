"""Learning-rate schedules: functions from the step to the factor on the recipe's learning rate.

Each takes the run's `Horizon` of T steps, and returns `factor(s)`; s is 0 at the first optimizer step. The factor
depends on nothing else: not on the world size, gradient accumulation or a resume. Every schedule starts with
W = `warmup` steps in which the factor is (s + 1) / W. Its own formula applies from step W on. Steps after the end of
the run have the last factor.
"""

import inspect
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial, wraps
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from ddpforge.interfaces import Duration, Horizon, Schedule

log = logging.getLogger("ddpforge")

_Warmup = Annotated[Duration, Field(description="Duration of the linear rise to the full learning rate.")]
_MinLRRatio = Annotated[
    float, Field(ge=0, le=1, description="Factor at the last step, a fraction of the learning rate.")
]
_NONE = Duration(0, "st")
_STEP = Duration(1, "st")


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
        Annotated[Sequence[Duration], Field(min_length=1, max_length=1000)] | None,
        Field(description="Durations from the start, at which the factor is multiplied by `gamma`."),
    ] = None,
    step_size: Annotated[
        Duration | None, Field(description="Multiply by `gamma` after each of these durations, instead of milestones.")
    ] = None,
    gamma: Annotated[float, Field(gt=0, lt=1, description="Multiplier of the factor at each milestone.")] = 0.1,
    warmup: _Warmup = _NONE,
) -> Schedule:
    """Returns gamma to the power of the number of reached milestones; a milestone of m steps is reached at step m.

    This is torch's `MultiStepLR`; with `step_size` it is `StepLR`. Logs a warning for milestones after the run's end.

    Raises:
        ValueError: Neither or both of `milestones` and `step_size` are given; milestones do not increase or are within
            the warm-up; or the warm-up is not shorter than the run.
    """
    first = _warmup_steps(horizon, warmup)
    if (milestones is None) == (step_size is None):
        raise ValueError("milestones: write either `milestones` or `step_size`")
    if step_size is not None:
        size = _at_least_one(horizon, step_size, "step_size")
        return _after_warmup(first, lambda s: gamma ** (s // size))
    steps = [horizon.steps(milestone) for milestone in milestones or ()]
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


def exponential(
    horizon: Horizon,
    *,
    gamma: Annotated[float, Field(gt=0, le=1, description="Factor after the first `period`.")],
    period: Annotated[Duration, Field(description="Duration of a fall by `gamma`.")] = _STEP,
    warmup: _Warmup = _NONE,
) -> Schedule:
    """Returns gamma^((s - W) / period), a smooth fall. With a period of one step this is torch's `ExponentialLR`.

    Raises ValueError if the period has no step, or the warm-up is not shorter than the run.
    """
    first, length = _warmup_steps(horizon, warmup), _at_least_one(horizon, period, "period")
    return _after_warmup(first, lambda s: gamma ** ((s - first) / length))


def polynomial(
    horizon: Horizon,
    *,
    power: Annotated[float, Field(gt=0, description="Exponent; 1 is `linear`.")] = 1.0,
    warmup: _Warmup = _NONE,
    min_lr_ratio: _MinLRRatio = 0.0,
) -> Schedule:
    """Returns r + (1 - r) · (1 - p)^power with r = `min_lr_ratio` and p as for `linear`: 1 at step W, r at the end.

    Raises ValueError if the warm-up is not shorter than the run, or the run's length is a wall time.
    """
    return _fall(horizon, warmup, min_lr_ratio, lambda p: (1 - p) ** power)


def cosine_restarts(
    horizon: Horizon,
    *,
    period: Annotated[Duration, Field(description="Duration of the first cycle.")],
    period_factor: Annotated[int, Field(ge=1, description="Length of each cycle divided by the length before.")] = 1,
    warmup: _Warmup = _NONE,
    min_lr_ratio: _MinLRRatio = 0.0,
) -> Schedule:
    """Returns r + (1 - r) · (1 + cos πc) / 2 with r = `min_lr_ratio`; c rises from 0 to 1 in each cycle, then restarts.

    c = (s - start) / length of the cycle that began at step `start`; the first begins at step W. Schedule of Loshchilov
    and Hutter, "SGDR" (2017), and torch's `CosineAnnealingWarmRestarts`.

    Raises ValueError if the period has no step, or the warm-up is not shorter than the run.
    """
    first, length = _warmup_steps(horizon, warmup), _at_least_one(horizon, period, "period")

    def factor(s: int) -> float:
        s, cycle = s - first, length
        if period_factor == 1:
            s %= cycle
        else:
            while s >= cycle:
                s, cycle = s - cycle, cycle * period_factor
        return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * s / cycle)) / 2

    return _after_warmup(first, factor)


def inverse_sqrt(
    horizon: Horizon,
    *,
    warmup: _Warmup = _NONE,
    timescale: Annotated[
        Duration | None, Field(description="Duration after which the factor is 1 / √2; absent: the warm-up.")
    ] = None,
) -> Schedule:
    """Returns 1 / √(1 + (s - W) / timescale): 1 at step W. With the warm-up as the timescale this is √(W / s).

    Schedule of Vaswani et al., "Attention Is All You Need" (2017). Raises ValueError if the timescale has no step, or
    the warm-up is not shorter than the run.
    """
    first = _warmup_steps(horizon, warmup)
    if timescale is None and not first:
        raise ValueError("timescale: write `timescale` or `warmup`")
    length = _at_least_one(horizon, timescale, "timescale") if timescale else first
    return _after_warmup(first, lambda s: 1 / math.sqrt(1 + (s - first) / length))


_Rise = Annotated[float, Field(gt=0, lt=1, description="Share of the run in which the learning rate rises.")]
_Anneal = Annotated[Literal["cosine", "linear"], Field(description="Shape of the rise and the fall.")]


def onecycle(
    horizon: Horizon,
    *,
    rise: _Rise = 0.3,
    div_factor: Annotated[float, Field(ge=1, description="The first factor is 1 / div_factor.")] = 25.0,
    final_div_factor: Annotated[
        float, Field(ge=1, description="The last factor is 1 / (div_factor · final_div_factor).")
    ] = 1e4,
    anneal: _Anneal = "cosine",
) -> Schedule:
    """Returns the factor of a 1cycle: from 1 / div_factor to 1, then to 1 / (div_factor · final_div_factor).

    The learning rate of the recipe is the largest rate. The peak is at step rise · T - 1, which need not be a whole
    number. This is torch's `OneCycleLR`, in which `rise` is `pct_start`; `onecycle_momentum` is its momentum. Schedule
    of Smith and Topin, "Super-Convergence" (2018). Raises ValueError if the run's length is a wall time.
    """
    start = 1 / div_factor
    return _one_cycle(_total(horizon), rise, anneal, start, 1.0, start / final_div_factor)


def ramp(
    horizon: Horizon,
    *,
    start: Annotated[float, Field(ge=0, description="Factor at the first step.")],
    end: Annotated[float, Field(ge=0, description="Factor at the last step.")] = 1.0,
    shape: _Anneal = "cosine",
) -> Schedule:
    """Returns the factor from `start` at the first step to `end` at the last one, along a half cosine or a line.

    For options that rise, e.g. the weight decay of DINO (Caron et al., 2021) in `[optimizer.schedules.weight_decay]`.
    Raises ValueError if the run's length is a wall time.
    """
    span = max(1, _total(horizon) - 1)
    return lambda s: _between(start, end, min(1.0, s / span), shape)


def onecycle_momentum(
    horizon: Horizon,
    *,
    rise: _Rise = 0.3,
    lowest: Annotated[float, Field(ge=0, le=1, description="Factor at the peak of the learning rate.")] = 0.85 / 0.95,
    anneal: _Anneal = "cosine",
) -> Schedule:
    """Returns the factor of a 1cycle for momentum or betas: from 1 to `lowest`, then back to 1.

    Use it in `[optimizer.schedules.momentum]` or `[optimizer.schedules.beta1]`, with the largest momentum in
    `[optimizer]`. Raises ValueError if the run's length is a wall time.
    """
    return _one_cycle(_total(horizon), rise, anneal, 1.0, lowest, 1.0)


def hf_linear(horizon: Horizon, *, warmup: _Warmup = _NONE) -> Schedule:
    """Returns s / W in the warm-up, then (T - s) / (T - W): `get_linear_schedule_with_warmup` of Transformers.

    Unlike `linear`, the first step of a warm-up has the rate 0, and the last step of the run has a rate above 0. Raises
    ValueError if the warm-up is not shorter than the run, or the run's length is a wall time.
    """
    return _of_transformers(horizon, warmup, lambda left, span: max(0.0, left / span))


def hf_cosine(
    horizon: Horizon,
    *,
    warmup: _Warmup = _NONE,
    num_cycles: Annotated[float, Field(gt=0, description="Waves of the cosine; 0.5 falls once from 1 to 0.")] = 0.5,
) -> Schedule:
    """Returns s / W in the warm-up, then (1 + cos(2π · num_cycles · p)) / 2 with p = (s - W) / (T - W).

    This is `get_cosine_schedule_with_warmup` of Transformers; see `hf_linear` for the difference from `cosine`. Raises
    ValueError if the warm-up is not shorter than the run, or the run's length is a wall time.
    """
    wave = math.pi * num_cycles * 2.0
    return _of_transformers(
        horizon, warmup, lambda left, span: max(0.0, 0.5 * (1.0 + math.cos(wave * ((span - left) / span))))
    )


# ---------------------------------------------------------------------------------------------- functions of users
def adopted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turns `f(step, **options) -> factor` into a component; returns a function without a first parameter `step`."""
    parameters = inspect.signature(function).parameters
    if next(iter(parameters), "") != "step" or "horizon" in parameters:
        return function

    @wraps(function)
    def component(**options: Any) -> Schedule:
        return partial(function, **options)

    own = [parameter.replace(kind=parameter.KEYWORD_ONLY) for name, parameter in parameters.items() if name != "step"]
    component.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    return component


# ---------------------------------------------------------------------------------------------- parts
def _of_transformers(horizon: Horizon, warmup: Duration, fall: Callable[[int, int], float]) -> Schedule:
    """Returns a schedule with the warm-up of Transformers; `fall` gets the steps left, and the steps after warm-up."""
    total, first = _total(horizon), _warmup_steps(horizon, warmup)
    return lambda s: s / first if s < first else fall(total - min(s, total), total - first)


def _one_cycle(total: int, rise: float, anneal: str, start: float, peak: float, end: float) -> Schedule:
    """Returns a schedule from `start` to `peak` and on to `end`, as torch's OneCycleLR with two phases."""
    up, last = rise * total - 1, total - 1
    if up == 0:
        raise ValueError(f"rise = {rise:g} of {total} steps is one step, in which nothing can rise: set a larger rise")

    def factor(s: int) -> float:
        s = min(s, last)
        if s <= up:
            return _between(start, peak, s / up, anneal)
        return _between(peak, end, (s - up) / (last - up), anneal)

    return factor


def _between(first: float, last: float, share: float, anneal: str) -> float:
    if anneal == "linear":
        return (last - first) * share + first
    return last + (first - last) / 2.0 * (math.cos(math.pi * share) + 1)


def _at_least_one(horizon: Horizon, duration: Duration, name: str) -> int:
    steps = horizon.steps(duration)
    if steps < 1:
        raise ValueError(f"{name}: {duration} is less than a step")
    return steps


def _fall(horizon: Horizon, warmup: Duration, min_lr_ratio: float, shape: Callable[[float], float]) -> Schedule:
    """Returns a schedule from 1 to `min_lr_ratio` along `shape`, which falls from 1 to 0 while p rises from 0 to 1."""
    first = _warmup_steps(horizon, warmup)
    span = max(1, _total(horizon) - 1 - first)  # a single step after the warm-up has p = 0
    return _after_warmup(first, lambda s: min_lr_ratio + (1 - min_lr_ratio) * shape(min(1.0, (s - first) / span)))


def _after_warmup(steps: int, schedule: Schedule) -> Schedule:
    return (lambda s: (s + 1) / steps if s < steps else schedule(s)) if steps else schedule


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
            " set train.length in epochs or steps, or use another schedule, such as `constant` or `step`"
        )
    return horizon.total
