"""Training ends when a metric stops getting better, and only then."""

import math

import pytest

from ddpforge.builtin.callbacks.early_stopping import EarlyStopping
from ddpforge.errors import PluginError


def stops_at(stopping: EarlyStopping, values: list[float]) -> int | None:
    """The evaluation (from 1) that ends training."""
    for number, value in enumerate(values, start=1):
        if stopping.on_eval(number, {stopping.metric: value}):
            return number
    return None


def test_patience_counts_evaluations_without_a_new_best() -> None:
    assert stops_at(EarlyStopping("eval/loss", patience=2), [3.0, 2.0, 2.5, 1.0, 1.0, 1.5]) == 6


def test_more_is_better_for_accuracies() -> None:
    assert stops_at(EarlyStopping("eval/accuracy", patience=2), [0.5, 0.6, 0.7, 0.6, 0.65]) == 5


def test_less_is_better_for_mean_absolute_errors() -> None:
    assert stops_at(EarlyStopping("eval/mae", patience=2), [3.0, 2.0, 2.5, 2.0]) == 4


def test_mode_decides_for_any_other_metric() -> None:
    assert stops_at(EarlyStopping("eval/reward", patience=1, mode="max"), [1.0, 2.0, 1.0]) == 3
    assert stops_at(EarlyStopping("eval/accuracy", patience=1, mode="min"), [1.0, 2.0]) == 2
    with pytest.raises(ValueError, match='less or more of "eval/reward" is better: set mode'):
        EarlyStopping("eval/reward", patience=1)


def test_a_gain_of_min_delta_is_too_small() -> None:
    assert stops_at(EarlyStopping("eval/loss", patience=2, min_delta=0.5), [3.0, 2.75, 2.5, 2.0]) == 3
    assert stops_at(EarlyStopping("eval/loss", patience=2, min_delta=0.5), [3.0, 2.75, 2.25, 2.0]) is None


@pytest.mark.parametrize("metric", ["eval/loss", "eval/accuracy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_never_best(metric: str, value: float) -> None:
    assert stops_at(EarlyStopping(metric, patience=2), [value, value]) == 2
    stopping = EarlyStopping(metric, patience=3)
    assert stops_at(stopping, [value, 1.0, value]) is None
    assert stopping.state() == {"best": 1.0, "waited": 1}


def test_an_unknown_metric_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(PluginError, match=r"eval/accurracy") as caught:
        EarlyStopping("eval/accurracy", patience=1, mode="max").on_eval(1, {"eval/loss": 1.0, "eval/accuracy": 0.5})
    assert caught.value.hints == ("one of: eval/accuracy, eval/loss",)


def test_a_resumed_run_counts_on() -> None:
    first = EarlyStopping("eval/loss", patience=3)
    assert stops_at(first, [1.0, 2.0, 2.0]) is None
    second = EarlyStopping("eval/loss", patience=3)
    second.load_state(first.state())
    assert stops_at(second, [1.5]) == 1
