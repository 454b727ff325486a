"""Metrics of regression: the errors of predicted numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpforge.interfaces import Metric, Total

if TYPE_CHECKING:
    from torch import Tensor


class MeanAbsoluteError(Metric):
    """The absolute error, averaged over the values of a sample and over samples.

    Takes predictions and targets of one shape [B, ...].
    """

    name = "mae"
    lower_is_better = True

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """Errors and samples; raises ValueError for two shapes, which would otherwise be broadcast."""
        if outputs.shape != targets.shape:
            raise ValueError(f"mae compares equal shapes, not {list(outputs.shape)} with {list(targets.shape)}")
        errors = (outputs.detach().float() - targets).abs()
        return Total(errors.reshape(len(errors), -1).mean(dim=1).sum(), len(errors))
