"""Calibration of classifiers: difference between confidence and accuracy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ddpforge.interfaces import Metric, Total, device_kind

if TYPE_CHECKING:
    from torch import Tensor


class CalibrationError(Metric):
    """Expected calibration error: |confidence - accuracy| in bins of confidence, averaged over samples.

    Takes logits [B, C] and int64 classes [B]. Confidence is the largest probability. Guo et al. 2017, arXiv:1706.04599.
    """

    name = "calibration_error"
    lower_is_better = True

    def __init__(
        self,
        *,
        bins: Annotated[int, Field(ge=1, le=10_000, description="Number of bins of equal width from 0 to 1.")] = 15,
    ) -> None:
        self.bins = bins

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """Returns the sum of confidence minus hits in each bin [bins], and the number of samples."""
        confidence, predicted = outputs.to(device_kind(outputs.device).widest_float).softmax(dim=-1).max(dim=-1)
        bin = (confidence * self.bins).long().clamp(max=self.bins - 1)
        gaps = confidence.new_zeros(self.bins)
        return Total(
            gaps.index_add_(0, bin.flatten(), (confidence - (predicted == targets).to(confidence)).flatten()),
            targets.numel(),
        )

    def finish(self, sum: Tensor, count: Tensor) -> float:
        """Returns the mean of the bins' absolute differences, weighted by their samples."""
        return float(sum.abs().sum() / count)
