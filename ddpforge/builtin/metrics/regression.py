"""Regression metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpforge.interfaces import Metric, Total

if TYPE_CHECKING:
    from torch import Tensor


class MeanAbsoluteError(Metric):
    """Mean absolute error over the values of a sample and over samples.

    Takes predictions and targets of the same shape [B, ...].
    """

    name = "mae"
    lower_is_better = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """Returns the sum of errors and the number of samples; raises ValueError if the shapes differ."""
        if outputs.shape != targets.shape:
            raise ValueError(f"mae needs equal shapes, got {list(outputs.shape)} and {list(targets.shape)}")
        errors = (outputs.detach().float() - targets).abs()
        return Total(errors.reshape(len(errors), -1).mean(dim=1).sum(), len(errors))
