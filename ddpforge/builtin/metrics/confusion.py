"""Metrics of classifiers that compare hits with misses class by class: over samples, over tokens or over pixels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ddpforge.interfaces import Metric, Total

if TYPE_CHECKING:
    from torch import Tensor


class _ClassByClass(Metric):
    """Counts, for each class, the hits, how often it was predicted, and how often it was the target: [3, C].

    Takes logits [B, C, ...] and int64 classes [B, ...]; a target that is no class is a miss.
    """

    lower_is_better = False

    def __init__(
        self,
        *,
        ignore_index: Annotated[
            int | None, Field(ge=-(2**31), lt=2**31, description="The target that does not count; absent: none.")
        ] = None,
    ) -> None:
        self.ignore_index = ignore_index

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """The counts; raises ValueError for shapes that do not go together."""
        if outputs.ndim < 2 or (len(outputs), *outputs.shape[2:]) != targets.shape:
            raise ValueError(
                f"{self.name} takes logits [B, C, ...] and classes [B, ...], "
                f"not {[*outputs.shape]} and {[*targets.shape]}"
            )
        predicted, wanted, classes = outputs.argmax(dim=1), targets, outputs.shape[1]
        counts = (
            (targets != self.ignore_index).double() if self.ignore_index is not None else targets.new_ones(()).double()
        )
        counts, target = counts.expand(targets.shape), wanted.clamp(0, classes - 1)
        found = counts.new_zeros(3, classes)
        for row, (which, weights) in enumerate(
            [(target, counts * (predicted == wanted)), (predicted, counts), (target, counts * (target == wanted))]
        ):
            found[row].index_add_(0, which.flatten(), weights.flatten())
        return Total(found, counts.sum())


class F1(_ClassByClass):
    """The harmonic mean of precision and recall, by default averaged over the classes that occur, as `f1`.

    With another average it is reported as `f1_micro`, `f1_weighted` or `f1_each`.
    """

    def __init__(
        self,
        *,
        average: Annotated[
            Literal["macro", "micro", "weighted", "each"],
            Field(description="All classes alike, all hits and misses together, by the number of targets, or none."),
        ] = "macro",
        ignore_index: Annotated[
            int | None, Field(ge=-(2**31), lt=2**31, description="The target that does not count; absent: none.")
        ] = None,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.average, self.name = average, "f1" if average == "macro" else f"f1_{average}"

    def finish(self, sum: Tensor, count: Tensor) -> float | Mapping[str, float]:
        """One number, or one for each class; a class that does not occur has none."""
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
    """The intersection over union of predicted and target pixels, averaged over the classes that occur."""

    name = "iou"

    def finish(self, sum: Tensor, count: Tensor) -> float:
        """The mean over classes."""
        hits, predicted, wanted = sum
        return float((hits / (predicted + wanted - hits)).nanmean())
