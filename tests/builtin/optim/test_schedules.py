"""Schedules as tables of numbers, and compared with torch's if torch has the same."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    StepLR,
)

from ddpforge.builtin.optim.schedules import (
    constant,
    cosine,
    cosine_restarts,
    exponential,
    hf_cosine,
    hf_linear,
    inverse_sqrt,
    linear,
    onecycle,
    onecycle_momentum,
    polynomial,
    step,
    wsd,
)
from ddpforge.components.registry import Registry
from ddpforge.interfaces import Duration, Horizon, Schedule


def run(total: int | None = 10, steps_per_epoch: int | None = 5) -> Horizon:
    return Horizon(total, steps_per_epoch)


def st(steps: int) -> Duration:
    return Duration(steps, "st")


def table(schedule: Schedule, steps: int = 10) -> list[float]:
    return [round(schedule(s), 6) for s in range(steps)]


# ---------------------------------------------------------------------------------------------- tables
def test_constant() -> None:
    assert table(constant(run())) == [1.0] * 10
    assert table(constant(run(), warmup=st(4))) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


def test_linear() -> None:
    assert table(linear(run(5)), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert table(linear(run(7), warmup=st(2), min_lr_ratio=0.2), 7) == [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]


def test_cosine() -> None:
    root = math.sqrt(0.5)
    falling = [1.0, round((1 + root) / 2, 6), 0.5, round((1 - root) / 2, 6), 0.0]
    assert table(cosine(run(5)), 5) == falling
    assert table(cosine(run(7), warmup=st(2)), 7) == [0.5, 1.0, *falling]
    assert cosine(run(7), warmup=st(2), min_lr_ratio=0.1)(6) == 0.1


def test_step() -> None:
    schedule = step(run(), milestones=[st(3), Duration(1, "ep"), st(9)], gamma=0.5)
    assert table(schedule) == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25, 0.125]
    assert table(step(run(), milestones=[st(2)], warmup=st(2)), 4) == [0.5, 1.0, 0.1, 0.1]


def test_wsd() -> None:
    assert table(wsd(run(), decay=st(4), warmup=st(2))) == [0.5, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25, 0.0]
    assert table(wsd(run(), decay=st(4), min_lr_ratio=0.2))[5:] == [1.0, 0.8, 0.6, 0.4, 0.2]
    assert table(wsd(run(), decay=st(4), shape="1-sqrt"))[5:] == [
        1.0,
        0.5,
        round(1 - math.sqrt(0.5), 6),
        round(1 - math.sqrt(0.75), 6),
        0.0,
    ]
    assert table(wsd(run(), decay=st(8), warmup=st(2)))[:4] == [0.5, 1.0, 0.875, 0.75]


# ---------------------------------------------------------------------------------------------- against torch
def test_milestones_beyond_the_end_are_ignored_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Allows a test run of three epochs of a recipe for 90."""
    assert table(step(run(), milestones=[st(2), st(10), st(60)], gamma=0.5), 10)[-1] == 0.5
    assert "the run ends at step 10, before the milestones 10, 60" in caplog.text


@pytest.mark.parametrize(
    ("schedule", "torchs"),
    [
        (cosine(run(20)), lambda o: CosineAnnealingLR(o, T_max=19)),
        (cosine(run(20), min_lr_ratio=0.1), lambda o: CosineAnnealingLR(o, T_max=19, eta_min=0.1)),
        (linear(run(20), min_lr_ratio=0.3), lambda o: LinearLR(o, 1.0, 0.3, total_iters=19)),
        (step(run(20), milestones=[st(5), st(12)]), lambda o: MultiStepLR(o, [5, 12], gamma=0.1)),
        (constant(run(20), warmup=st(8)), lambda o: LinearLR(o, 1 / 8, 1.0, total_iters=7)),
        (step(run(20), step_size=st(6)), lambda o: StepLR(o, 6, gamma=0.1)),
        (exponential(run(20), gamma=0.9), lambda o: ExponentialLR(o, 0.9)),
        (polynomial(run(20), power=2.0), lambda o: PolynomialLR(o, total_iters=19, power=2.0)),
        (cosine_restarts(run(20), period=st(6)), lambda o: CosineAnnealingWarmRestarts(o, 6)),
        (
            cosine_restarts(run(20), period=st(3), period_factor=2, min_lr_ratio=0.1),
            lambda o: CosineAnnealingWarmRestarts(o, 3, T_mult=2, eta_min=0.1),
        ),
        (onecycle(run(20)), lambda o: OneCycleLR(o, 1.0, total_steps=20, cycle_momentum=False)),
        (
            onecycle(run(20), rise=0.5, div_factor=10, final_div_factor=100, anneal="linear"),
            lambda o: OneCycleLR(o, 1.0, 20, None, None, 0.5, "linear", False, div_factor=10, final_div_factor=100),
        ),
    ],
    ids=[
        *("cosine", "cosine to a floor", "linear", "step", "warm-up", "step_size", "exponential", "polynomial"),
        *("cosine_restarts", "growing cosine_restarts", "onecycle", "linear onecycle"),
    ],
)
def test_schedules_equal_those_of_torch(
    schedule: Schedule, torchs: Callable[[torch.optim.Optimizer], LRScheduler]
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = torchs(optimizer)
    for s in range(20):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(schedule(s), abs=1e-12)
        optimizer.step()
        scheduler.step()


def test_onecycle_momentum_equals_that_of_torch() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0, momentum=0.9)
    scheduler, factor = OneCycleLR(optimizer, 1.0, total_steps=20), onecycle_momentum(run(20))
    for s in range(20):
        assert optimizer.param_groups[0]["momentum"] == pytest.approx(0.95 * factor(s), abs=1e-12)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("warmup", [0, 6])
def test_schedules_equal_those_of_transformers_to_the_last_digit(warmup: int) -> None:
    optimization = pytest.importorskip("transformers.optimization")
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = [
        optimization.get_linear_schedule_with_warmup(optimizer, warmup, 20),
        optimization.get_cosine_schedule_with_warmup(optimizer, warmup, 20),
        optimization.get_cosine_schedule_with_warmup(optimizer, warmup, 20, num_cycles=1.5),
    ]
    ours = [
        hf_linear(run(20), warmup=st(warmup)),
        hf_cosine(run(20), warmup=st(warmup)),
        hf_cosine(run(20), warmup=st(warmup), num_cycles=1.5),
    ]
    for schedule, scheduler in zip(ours, theirs, strict=True):
        assert [schedule(s) for s in range(20)] == [scheduler.lr_lambdas[0](s) for s in range(20)]


def test_inverse_sqrt_falls_from_the_end_of_the_warm_up() -> None:
    schedule = inverse_sqrt(run(100), warmup=st(4))
    assert table(schedule, 5) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert schedule(16) == pytest.approx(math.sqrt(4 / 16))
    assert inverse_sqrt(run(100), timescale=st(25))(25) == pytest.approx(1 / math.sqrt(2))


def test_a_function_of_the_step_is_a_schedule(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("def halved(step, *, every: int = 10):\n    return 0.5 ** (step // every)\n")
    registry = Registry.installed()
    options = registry.options_model("schedule", "./s.py:halved", tmp_path)
    assert list(options.model_fields) == ["every"]
    assert table(registry.load("schedule", "./s.py:halved", tmp_path)(every=2), 5) == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_factor_is_a_pure_function_of_the_step() -> None:
    """Covers trap 04: more calls, other orders and a new schedule give the same factors."""
    schedule = cosine(run(20), warmup=st(3))
    forwards = [schedule(s) for s in range(20)]
    assert [schedule(s) for s in reversed(range(20)) for _ in range(4)][::4] == forwards[::-1]
    assert [cosine(run(20), warmup=st(3))(s) for s in range(20)] == forwards
    LambdaLR(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), schedule)  # fits torch's protocol too


# ---------------------------------------------------------------------------------------------- edges
def test_durations_in_epochs_count_the_steps_of_an_epoch() -> None:
    assert table(constant(run(), warmup=Duration(0.5, "ep")), 4) == [0.333333, 0.666667, 1.0, 1.0]


@pytest.mark.parametrize("schedule", [cosine, linear])
def test_run_of_one_step_trains_at_the_full_rate(schedule: Callable[[Horizon], Schedule]) -> None:
    assert schedule(run(1))(0) == 1.0


@pytest.mark.parametrize(
    ("schedule", "last"),
    [
        (constant(run()), 1.0),
        (linear(run(), min_lr_ratio=0.2), 0.2),
        (cosine(run(), min_lr_ratio=0.2), 0.2),
        (step(run(), milestones=[st(2)]), 0.1),
        (wsd(run(), decay=st(2), min_lr_ratio=0.2), 0.2),
        (polynomial(run(), min_lr_ratio=0.2), 0.2),
        (onecycle_momentum(run(), lowest=0.5), 1.0),
    ],
)
def test_steps_beyond_the_run_keep_the_last_factor(schedule: Schedule, last: float) -> None:
    assert schedule(9) == schedule(10) == schedule(1000) == last


def test_schedules_without_an_end_need_no_total() -> None:
    endless = run(None, None)
    assert table(constant(endless, warmup=st(2)), 3) == [0.5, 1.0, 1.0]
    assert table(step(endless, milestones=[st(2)]), 3) == [1.0, 1.0, 0.1]
    assert table(exponential(endless, gamma=0.5), 3) == [1.0, 0.5, 0.25]
    assert table(cosine_restarts(endless, period=st(2)), 3) == [1.0, 0.5, 1.0]
    assert inverse_sqrt(endless, warmup=st(1))(4) == 0.5


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: constant(run(), warmup=st(10)), "warm-up of 10 steps is not shorter than the run of 10 steps"),
        (lambda: cosine(run(), warmup=Duration(2, "ep")), "warm-up of 10 steps is not shorter than the run"),
        (lambda: cosine(run(), warmup=Duration(5, "m")), "5m is a wall time; expected epochs or steps"),
        (lambda: cosine(run(None)), "needs the run's length in steps, but train.length is a wall time"),
        (lambda: linear(run(None)), "needs the run's length in steps"),
        (lambda: wsd(run(None), decay=st(1)), "needs the run's length in steps"),
        (
            lambda: constant(run(10, None), warmup=Duration(1, "ep")),
            "this data has no epochs of a fixed length; use steps",
        ),
        (lambda: step(run()), "write either `milestones` or `step_size`"),
        (lambda: step(run(), milestones=[st(3)], step_size=st(3)), "write either `milestones` or `step_size`"),
        (lambda: inverse_sqrt(run()), "timescale: write `timescale` or `warmup`"),
        (lambda: exponential(run(), gamma=0.5, period=st(0)), "period: 0st is less than a step"),
        (lambda: onecycle(run(None)), "needs the run's length in steps"),
        (lambda: onecycle(run(10), rise=0.1), "rise = 0.1 of 10 steps is one step, in which nothing can rise"),
        (lambda: onecycle_momentum(run(2), rise=0.5), "rise = 0.5 of 2 steps is one step"),
        (lambda: step(run(), milestones=[st(3), st(3)]), r"must increase, but in steps they are \[3, 3\]"),
        (lambda: step(run(), milestones=[st(0)]), "milestones: the first is step 0, but it must be step 1 or later"),
        (lambda: step(run(), milestones=[st(1)], warmup=st(2)), "is step 1, but it must be step 2 or later"),
        (lambda: wsd(run(), decay=st(9), warmup=st(2)), "the decay has 9 steps, but must have 1 to 8"),
        (lambda: wsd(run(), decay=st(0)), "the decay has 0 steps, but must have 1 to 10"),
    ],
)
def test_schedules_that_do_not_fit_the_run_are_refused(build: Callable[[], Schedule], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


# ---------------------------------------------------------------------------------------------- warm-up and every kind
# The rule of what follows a warm-up of W steps: the schedule of a run that is W steps shorter, or the rest of the
# schedule without warm-up.
AFTER: dict[str, tuple[Callable[..., Schedule], dict[str, Any], str]] = {
    "constant": (constant, {}, "shorter"),
    "linear": (linear, {"min_lr_ratio": 0.1}, "shorter"),
    "cosine": (cosine, {"min_lr_ratio": 0.1}, "shorter"),
    "exponential": (exponential, {"gamma": 0.9, "period": st(2)}, "shorter"),
    "polynomial": (polynomial, {"power": 2.0, "min_lr_ratio": 0.1}, "shorter"),
    "cosine_restarts": (cosine_restarts, {"period": st(3), "period_factor": 2}, "shorter"),
    "inverse_sqrt": (inverse_sqrt, {"timescale": st(3)}, "shorter"),
    "step": (step, {"step_size": st(6)}, "rest"),
    "milestones": (step, {"milestones": [st(5), st(9)]}, "rest"),
    "wsd": (wsd, {"decay": st(7), "shape": "1-sqrt"}, "rest"),
    "hf_linear": (hf_linear, {}, "shorter"),
    "hf_cosine": (hf_cosine, {"num_cycles": 1.5}, "shorter"),
}


@pytest.mark.parametrize("warmup", [1, 4])
@pytest.mark.parametrize("name", AFTER)
def test_a_warmup_rises_to_1_and_delays_the_schedule_of_every_kind(name: str, warmup: int) -> None:
    make, options, rule = AFTER[name]
    found = [make(run(20), warmup=st(warmup), **options)(s) for s in range(24)]
    first = 0 if name.startswith("hf") else 1  # the schedules of Transformers begin with 0
    assert found[:warmup] == pytest.approx([(s + first) / warmup for s in range(warmup)])
    assert found[warmup] == pytest.approx(1.0)
    if rule == "shorter":
        plain = make(run(20 - warmup), **options)
        assert found[warmup:] == pytest.approx([plain(s) for s in range(24 - warmup)])
    else:
        plain = make(run(20), **options)
        assert found[warmup:] == pytest.approx([plain(s) for s in range(warmup, 24)])
