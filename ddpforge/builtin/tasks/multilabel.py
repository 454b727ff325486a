"""Multi-label classification: each sample has none, one or several labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import beside_targets, by_name, one_tensor, pair, parts_of
from ddpforge.errors import UsageError, described
from ddpforge.interfaces import Metric, SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Multilabel(Task):
    """Binary cross-entropy of logits [B, L] and labels [B, L], each 0 or 1; a batch is (inputs, labels).

    The loss is averaged over the labels of a sample, and computed in float32 for any precision of the model. Also
    reported: `accuracy`, the fraction of right labels, and the recipe's metrics.
    """

    items = "samples"

    def __init__(
        self,
        *,
        metrics: Annotated[
            Sequence[Metric], Field(description="Metrics to report in addition to loss and accuracy.")
        ] = (),
    ) -> None:
        self.reports = by_name(metrics, "accuracy")

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the summed cross-entropy, and the logits; raises ValueError if their shape is not that of labels."""
        inputs, labels = pair(batch, "multilabel", "(inputs, labels)")
        logits = one_tensor(model(inputs), "multilabel")
        if logits.shape != labels.shape:
            raise ValueError(f"the model returns logits {list(logits.shape)}, but the labels are {list(labels.shape)}")
        return self.loss_from_outputs(logits, batch), logits

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the summed cross-entropy."""
        import torch.nn.functional as F

        losses = F.binary_cross_entropy_with_logits(outputs.float(), batch[1].float(), reduction="none")
        return losses.mean(dim=1).sum()

    def count(self, batch: Batch) -> None:
        """Returns None, one item per sample; raises UsageError for labels below 0 or above 1."""
        import torch

        labels = pair(batch, "multilabel", "(inputs, labels)")[1]
        if labels.device.type != "cpu" or not labels.numel() or labels.dtype == torch.bool:
            return
        least, most = (float(end) for end in labels.aminmax())
        if least < 0 or most > 1:
            raise UsageError(
                f"task multilabel takes labels from 0 to 1; the data gives {described(labels)} from {least:g} to "
                f"{most:g}",
                hints=["return 0 or 1 for each label, and remove samples with unknown labels"],
            )

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns the fraction of right labels, and the recipe's metrics."""
        labels = batch[1]
        right = Total(((outputs > 0) == labels.bool()).sum(), labels.numel())
        return {"accuracy": right} | {name: metric(outputs, labels) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns `labels` [L] (probability above 0.5), their `probability`, and the true labels as `target`."""
        inputs, labels = parts_of(batch)
        probability = one_tensor(model(inputs), "multilabel").float().sigmoid()
        return beside_targets({"labels": (probability > 0.5).long(), "probability": probability}, labels)
