"""Gradient norms are read in one transfer: nonfinite steps, their number in a row, and the newest norm."""

import math
from typing import Any

import pytest
import torch
from support.doubles import saved

from ddpforge.errors import Diverged
from ddpforge.training.nonfinite import GradientNorms, RollBack, Rollbacks


def noted(*values: float, first: int = 1) -> GradientNorms:
    norms = GradientNorms()
    for step, value in enumerate(values, start=first):
        norms.add(step, torch.tensor(value))
    return norms


def test_no_norms_give_no_nonfinite_steps() -> None:
    norms = GradientNorms()
    assert norms.take() == []
    assert math.isnan(norms.newest)


def test_nonfinite_steps_and_the_newest_norm_are_returned() -> None:
    norms = noted(1.0, math.inf, 2.0, math.nan, 3.0, first=11)
    assert norms.take() == [12, 14]
    assert norms.newest == 3.0
    assert norms.nonfinite_in_a_row == 0
    assert norms.take() == []
    assert norms.newest == 3.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_steps_in_a_row_are_counted_across_reads(bad: float) -> None:
    norms = noted(1.0, bad, bad)
    assert norms.take() == [2, 3]
    assert norms.nonfinite_in_a_row == 2
    norms.add(4, torch.tensor(bad))
    assert norms.take() == [4]
    assert norms.nonfinite_in_a_row == 3
    norms.add(5, torch.tensor(0.0))
    assert norms.take() == []
    assert norms.nonfinite_in_a_row == 0


def test_a_nonfinite_first_step_counts_as_one_in_a_row() -> None:
    norms = noted(math.nan)
    assert norms.take() == [1]
    assert norms.nonfinite_in_a_row == 1


def test_rollbacks_to_a_later_step_are_counted_anew_and_without_a_checkpoint_the_run_diverges() -> None:
    request, rollbacks = RollBack([7], "the gradient of step 7 is not finite"), Rollbacks()
    for step in (4, 4, 8):
        checkpoint: Any = saved(step)
        assert rollbacks.count(request, checkpoint) is checkpoint
    with pytest.raises(Diverged, match="the gradient of step 7 is not finite, after 1 rollbacks"):
        rollbacks.count(request, None)
