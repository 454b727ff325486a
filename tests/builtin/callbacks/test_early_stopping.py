"""Early stopping ends training when a metric no longer improves, and only then."""

import math

import pytest

from ddpforge.builtin.callbacks.early_stopping import EarlyStopping
from ddpforge.errors import PluginError


def stops_at(stopping: EarlyStopping, values: list[float]) -> int | None:
    """Returns the number (from 1) of the evaluation that ends training."""
    for number, value in enumerate(values, start=1):
        if stopping.on_eval(number, {stopping.metric: value}):
            return number
    return None


def test_patience_counts_evaluations_without_a_new_best() -> None:
    assert stops_at(EarlyStopping("eval/loss", patience=2), [3.0, 2.0, 2.5, 1.0, 1.0, 1.5]) == 6


def test_higher_accuracy_is_better() -> None:
    assert stops_at(EarlyStopping("eval/accuracy", patience=2), [0.5, 0.6, 0.7, 0.6, 0.65]) == 5


def test_lower_mean_absolute_error_is_better() -> None:
    assert stops_at(EarlyStopping("eval/mae", patience=2), [3.0, 2.0, 2.5, 2.0]) == 4


def test_other_metrics_need_mode() -> None:
    assert stops_at(EarlyStopping("eval/reward", patience=1, mode="max"), [1.0, 2.0, 1.0]) == 3
    assert stops_at(EarlyStopping("eval/accuracy", patience=1, mode="min"), [1.0, 2.0]) == 2
    with pytest.raises(ValueError, match='less or more of "eval/reward" is better: set mode'):
        EarlyStopping("eval/reward", patience=1)


def test_improvement_must_exceed_min_delta() -> None:
    assert stops_at(EarlyStopping("eval/loss", patience=2, min_delta=0.5), [3.0, 2.75, 2.5, 2.0]) == 3
    assert stops_at(EarlyStopping("eval/loss", patience=2, min_delta=0.5), [3.0, 2.75, 2.25, 2.0]) is None


@pytest.mark.parametrize("metric", ["eval/loss", "eval/accuracy"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nonfinite_value_is_never_the_best(metric: str, value: float) -> None:
    assert stops_at(EarlyStopping(metric, patience=2), [value, value]) == 2
    stopping = EarlyStopping(metric, patience=3)
    assert stops_at(stopping, [value, 1.0, value]) is None
    assert stopping.state() == {"best": 1.0, "waited": 1}


def test_error_for_an_unknown_metric_names_the_known_metrics() -> None:
    with pytest.raises(PluginError, match=r"eval/accurracy") as caught:
        EarlyStopping("eval/accurracy", patience=1, mode="max").on_eval(1, {"eval/loss": 1.0, "eval/accuracy": 0.5})
    assert caught.value.hints == ("one of: eval/accuracy, eval/loss",)


def test_patience_counter_resumes() -> None:
    first = EarlyStopping("eval/loss", patience=3)
    assert stops_at(first, [1.0, 2.0, 2.0]) is None
    second = EarlyStopping("eval/loss", patience=3)
    second.load_state(first.state())
    assert stops_at(second, [1.5]) == 1
