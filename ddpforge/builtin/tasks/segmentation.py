"""Semantic segmentation: one class per pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from ddpforge.builtin.metrics.confusion import MeanIoU
from ddpforge.builtin.tasks.forms import (
    LabelSmoothing,
    by_name,
    cross_entropy,
    one_tensor,
    pair,
    parts_of,
    reject_targets,
)
from ddpforge.interfaces import Metric, SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Segmentation(Task):
    """Cross-entropy of logits [B, C, H, W] and int64 classes [B, H, W]; a batch is (images, classes).

    Every pixel has the same weight, except for pixels of the class `ignore_index`, which do not count. The loss is
    computed in float32 for any precision of the model. Also reported: `iou`, the mean intersection over union, and the
    recipe's metrics. Metrics that have an `ignore_index` ignore the same pixels.
    """

    items = "pixels"
    compiles = ("sum_of_losses",)

    def __init__(
        self,
        *,
        ignore_index: Annotated[
            int, Field(ge=-(2**31), lt=2**31, description="Class of pixels that are not counted.")
        ] = 255,
        label_smoothing: LabelSmoothing = 0.0,
        metrics: Annotated[Sequence[Metric], Field(description="Metrics to report in addition to loss and iou.")] = (),
    ) -> None:
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        for metric in metrics:
            if getattr(metric, "ignore_index", ignore_index) is None:  # it would count these pixels as misses
                metric.ignore_index = ignore_index  # type: ignore[attr-defined]
        self.reports = by_name([MeanIoU(ignore_index=ignore_index), *metrics])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropy summed over pixels, and the logits."""
        images, classes = pair(batch, "segmentation", "(images, classes)")
        logits = one_tensor(model(images), "segmentation")
        try:
            loss = self.sum_of_losses(logits, classes)
        except (IndexError, RuntimeError, ValueError) as error:
            reject_targets(error, "segmentation", logits, classes)
        return loss, logits

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the cross-entropy summed over pixels."""
        return self.sum_of_losses(outputs, batch[1])

    def sum_of_losses(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Returns the summed cross-entropy, in float32."""
        return cross_entropy(logits, classes, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing)

    def count(self, batch: Batch) -> Tensor:
        """Returns the number of counted pixels."""
        _, classes = pair(batch, "segmentation", "(images, classes)")
        return (classes != self.ignore_index).sum()

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns the mean intersection over union, and the recipe's metrics."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns the most probable class of every pixel, `classes` [H, W]."""
        images, _ = parts_of(batch)
        return {"classes": one_tensor(model(images), "segmentation").argmax(dim=1)}
