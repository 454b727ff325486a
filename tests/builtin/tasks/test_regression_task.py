"""The task `regression`: losses, shapes, options."""

from typing import Literal

import pytest
import torch
from torch import nn

from ddpforge.builtin.metrics.regression import MeanAbsoluteError
from ddpforge.builtin.tasks.regression import Regression


@pytest.mark.parametrize(
    ("loss", "delta", "expected"),
    [
        ("mse", None, (1 + 9) / 2 + (0 + 16) / 2),
        ("mae", None, (1 + 3) / 2 + (0 + 4) / 2),
        ("huber", None, (0.5 + 2.5) / 2 + (0 + 3.5) / 2),
        ("huber", 3.0, (0.5 + 4.5) / 2 + (0 + 7.5) / 2),
    ],
)
def test_errors_are_averaged_within_a_sample_and_summed_over_samples(
    loss: Literal["mse", "mae", "huber"], delta: float | None, expected: float
) -> None:
    predictions, targets = torch.tensor([[1.0, 3.0], [5.0, 4.0]]), torch.tensor([[0.0, 0.0], [5.0, 0.0]])
    task = Regression(loss=loss, delta=delta)
    summed, outputs = task.loss(nn.Identity(), (predictions, targets))
    assert summed.item() == pytest.approx(expected)
    assert torch.equal(outputs, predictions)
    assert task.count((predictions, targets)) is None  # one item per sample


def test_column_of_predictions_is_compared_elementwise_with_a_vector_of_targets() -> None:
    task = Regression(metrics=[MeanAbsoluteError()])
    batch = (torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1.0, 2.0, 5.0]))
    loss, outputs = task.loss(nn.Identity(), batch)
    assert loss.item() == 4.0
    mae = task.metrics(outputs, batch)["mae"]
    assert (float(mae.sum), mae.count) == (2.0, 3)


@pytest.mark.parametrize("shape", [(3, 2), (2, 3), (6,), (3, 1, 2, 2)])
def test_predictions_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="cannot be compared with targets of shape"):
        Regression().loss(nn.Identity(), (torch.zeros(shape), torch.zeros(3)))


def test_delta_without_huber_is_refused() -> None:
    with pytest.raises(ValueError, match='delta: only loss = "huber" has this option, not "mse"'):
        Regression(delta=2.0)
