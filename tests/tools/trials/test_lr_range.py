"""Learning rate range test: the suggestion for known losses."""

import math

import pytest

from ddpforge.tools.trials.lr_range import RangeTest, smoothed, suggested

RATES = [10.0**n for n in range(-6, 2)]


def test_rate_of_the_steepest_fall_of_the_loss_is_suggested() -> None:
    losses = [2.3, 2.3, 2.25, 2.0, 1.0, 0.6, 0.9, 5.0]
    assert suggested(RATES, losses) == 1e-2  # from 2.0 to 0.6 between its neighbours
    found = RangeTest(RATES, losses, suggested(RATES, losses), is_rank_zero=True)
    assert found.verdict() == "suggested optimizer.lr = 0.01: at this rate the loss fell fastest; it was lowest at 0.1"
    assert found.rows()[0] == ("1.00e-06", "2.3")


def test_fall_after_a_rise_of_the_loss_is_ignored() -> None:
    assert suggested(RATES, [2.0, 1.9, 1.5, 1.45, 3.0, 9.0, 4.0, 2.0]) == pytest.approx(1e-5)


@pytest.mark.parametrize("losses", [[], [1.0], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0]])
def test_loss_that_never_falls_gives_no_suggestion(losses: list[float]) -> None:
    assert suggested(RATES[: len(losses)], losses) is None
    assert "never fell" in RangeTest(RATES, losses, None, is_rank_zero=True).verdict()


def test_smoothed_loss_is_the_mean_of_equal_neighbours_on_both_sides() -> None:
    assert smoothed([0.0, 3.0, 6.0, 0.0, 1.0], 2) == [0.0, 3.0, 2.0, pytest.approx(7 / 3), 1.0]


def test_rates_need_not_be_evenly_spaced() -> None:
    """Uses the slope per factor of the rate."""
    rates = [1.0, math.e, math.e**2, math.e**8, math.e**9]
    assert suggested(rates, [5.0, 4.0, 3.0, 0.5, 0.4]) == math.e
