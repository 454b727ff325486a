"""Per-class metrics of classifiers of samples, tokens or pixels: F1 and mean IoU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ddpforge.interfaces import Metric, Total, device_kind

if TYPE_CHECKING:
    from torch import Tensor


class _ClassByClass(Metric):
    """Counts for each class: hits, predictions and targets, [3, C].

    Takes logits [B, C, ...] and int64 classes [B, ...]. A target outside of the classes is a miss.
    """

    lower_is_better = False

    def __init__(
        self,
        *,
        ignore_index: Annotated[
            int | None, Field(ge=-(2**31), lt=2**31, description="Target that is not counted; absent: none.")
        ] = None,
    ) -> None:
        self.ignore_index = ignore_index

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """Returns the counts; raises ValueError if the shapes do not fit together."""
        if outputs.ndim < 2 or (len(outputs), *outputs.shape[2:]) != targets.shape:
            raise ValueError(
                f"{self.name} takes logits [B, C, ...] and classes [B, ...], "
                f"not {[*outputs.shape]} and {[*targets.shape]}"
            )
        predicted, wanted, classes = outputs.argmax(dim=1), targets, outputs.shape[1]
        counted = targets != self.ignore_index if self.ignore_index is not None else targets.new_ones(())
        counts = counted.to(device_kind(targets.device).widest_float)
        counts, target = counts.expand(targets.shape), wanted.clamp(0, classes - 1)
        found = counts.new_zeros(3, classes)
        for row, (which, weights) in enumerate(
            [(target, counts * (predicted == wanted)), (predicted, counts), (target, counts * (target == wanted))]
        ):
            found[row].index_add_(0, which.flatten(), weights.flatten())
        return Total(found, counts.sum())


class F1(_ClassByClass):
    """Harmonic mean of precision and recall, reported as `f1`; by default the average over the classes that occur.

    Other averages are reported as `f1_micro`, `f1_weighted` or `f1_each`.
    """

    def __init__(
        self,
        *,
        average: Annotated[
            Literal["macro", "micro", "weighted", "each"],
            Field(description="Mean over classes, all samples together, mean weighted by targets, or each class."),
        ] = "macro",
        ignore_index: Annotated[
            int | None, Field(ge=-(2**31), lt=2**31, description="Target that is not counted; absent: none.")
        ] = None,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.average, self.name = average, "f1" if average == "macro" else f"f1_{average}"

    def finish(self, sum: Tensor, count: Tensor) -> float | Mapping[str, float]:
        """Returns one number, or one per class; NaN for a class that does not occur."""
        hits, predicted, wanted = sum
        if self.average == "micro":
            return float(2 * hits.sum() / (predicted + wanted).sum())
        each = 2 * hits / (predicted + wanted)
        if self.average == "each":
            return {str(i): float(x) for i, x in enumerate(each)}
        if self.average == "weighted":
            return float((each.nan_to_num() * wanted).sum() / wanted.sum())
        return float(each.nanmean())


class MeanIoU(_ClassByClass):
    """Intersection over union of predicted and target pixels, averaged over the classes that occur."""

    name = "iou"

    def finish(self, sum: Tensor, count: Tensor) -> float:
        """Returns the mean over classes."""
        hits, predicted, wanted = sum
        return float((hits / (predicted + wanted - hits)).nanmean())
