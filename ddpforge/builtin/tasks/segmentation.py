"""Choosing one class per pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from ddpforge.builtin.metrics.confusion import MeanIoU
from ddpforge.builtin.tasks.forms import by_name, cross_entropy, one_tensor, pair, parts_of, refuse_targets
from ddpforge.interfaces import Metric, Rows, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Segmentation(Task):
    """Cross-entropy of logits [B, C, H, W] and int64 classes [B, H, W]; a batch is (images, classes).

    Every pixel weighs the same, whichever image it is of; those of the class `ignore_index` weigh nothing. The loss is
    computed in float32 whatever the model's precision. Beside it are reported `iou`, the mean intersection over union,
    and the metrics that the recipe names, which leave the same pixels out where they have an `ignore_index`.
    """

    items = "pixels"
    compiles = ("sum_of_losses",)

    def __init__(
        self,
        *,
        ignore_index: Annotated[
            int, Field(ge=-(2**31), lt=2**31, description="The class of pixels that are not counted.")
        ] = 255,
        metrics: Annotated[Sequence[Metric], Field(description="What to report beside loss and iou.")] = (),
    ) -> None:
        self.ignore_index = ignore_index
        for metric in metrics:
            if getattr(metric, "ignore_index", ignore_index) is None:  # it would count these pixels as misses
                metric.ignore_index = ignore_index  # type: ignore[attr-defined]
        self.reports = by_name([MeanIoU(ignore_index=ignore_index), *metrics])

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over pixels, and the logits."""
        images, classes = pair(batch, "segmentation", "(images, classes)")
        logits = one_tensor(model(images), "segmentation")
        try:
            loss = self.sum_of_losses(logits, classes)
        except (IndexError, RuntimeError, ValueError) as error:
            refuse_targets(error, "segmentation", logits, classes)
        return loss, logits

    def sum_of_losses(self, logits: Tensor, classes: Tensor) -> Tensor:
        """The cross-entropy, in float32."""
        return cross_entropy(logits, classes, ignore_index=self.ignore_index)

    def count(self, batch: Batch) -> Tensor:
        """The pixels that are counted."""
        _, classes = pair(batch, "segmentation", "(images, classes)")
        return (classes != self.ignore_index).sum()

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | Rows]:
        """The mean intersection over union, and the metrics that the recipe names."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The most probable class of every pixel, `classes` [H, W]."""
        images, _ = parts_of(batch)
        return {"classes": one_tensor(model(images), "segmentation").argmax(dim=1)}
