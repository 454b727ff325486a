"""Schedules as tables of numbers, and compared with torch's if torch has the same."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LinearLR, LRScheduler, MultiStepLR

from ddpforge.builtin.optim.schedules import constant, cosine, linear, step, wsd
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
    ],
    ids=["cosine", "cosine to a floor", "linear", "step", "warm-up"],
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
    ],
)
def test_steps_beyond_the_run_keep_the_last_factor(schedule: Schedule, last: float) -> None:
    assert schedule(9) == schedule(10) == schedule(1000) == last


def test_constant_and_step_need_no_total() -> None:
    endless = run(None, None)
    assert table(constant(endless, warmup=st(2)), 3) == [0.5, 1.0, 1.0]
    assert table(step(endless, milestones=[st(2)]), 3) == [1.0, 1.0, 0.1]


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
