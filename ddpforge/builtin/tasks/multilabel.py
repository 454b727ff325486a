"""Saying which of several labels a sample has: none, one or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import beside_targets, by_name, described, one_tensor, pair, parts_of
from ddpforge.errors import UsageError
from ddpforge.interfaces import Metric, Rows, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Multilabel(Task):
    """Binary cross-entropy of logits [B, L] and labels [B, L], each 0 or 1; a batch is (inputs, labels).

    It is averaged over the labels of a sample, and computed in float32 whatever the model's precision. Beside it are
    reported `accuracy`, the share of labels that are right, and the metrics that the recipe names.
    """

    items = "samples"

    def __init__(
        self,
        *,
        metrics: Annotated[Sequence[Metric], Field(description="What to report beside loss and accuracy.")] = (),
    ) -> None:
        self.reports = by_name(metrics, "accuracy")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The cross-entropy summed over samples, and the logits; ValueError when there are not as many as labels."""
        import torch.nn.functional as F

        inputs, labels = pair(batch, "multilabel", "(inputs, labels)")
        logits = one_tensor(model(inputs), "multilabel")
        if logits.shape != labels.shape:
            raise ValueError(f"there are logits {list(logits.shape)} for labels {list(labels.shape)}")
        losses = F.binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="none")
        return losses.mean(dim=1).sum(), logits

    def count(self, batch: Batch) -> None:
        """Returns None, one item per sample; raises UsageError for labels below 0 or above 1, such as a filler."""
        import torch

        labels = pair(batch, "multilabel", "(inputs, labels)")[1]
        if labels.device.type != "cpu" or not labels.numel() or labels.dtype == torch.bool:
            return
        least, most = (float(end) for end in labels.aminmax())
        if least < 0 or most > 1:
            raise UsageError(
                f"task multilabel takes labels from 0 to 1; the data gives {described(labels)} from {least:g} to "
                f"{most:g}",
                hints=["give each sample's labels as 0 or 1, and leave out the samples that have none"],
            )

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | Rows]:
        """The share of right labels, and the metrics that the recipe names."""
        labels = batch[1]
        right = Total(((outputs > 0) == labels.bool()).sum(), labels.numel())
        return {"accuracy": right} | {name: metric(outputs, labels) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The `labels` [L] that are more probable than not, the `probability` of each, and the true ones, `target`."""
        inputs, labels = parts_of(batch)
        probability = one_tensor(model(inputs), "multilabel").float().sigmoid()
        return beside_targets({"labels": (probability > 0.5).long(), "probability": probability}, labels)
