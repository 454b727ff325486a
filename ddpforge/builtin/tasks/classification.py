"""Choosing one class per sample."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ddpforge.builtin.tasks.forms import beside_targets, by_name, one_tensor, pair, parts_of, refuse_targets
from ddpforge.interfaces import Data, Metric, Rows, Task, Total

Batch = tuple[Tensor, Tensor]


class Classification(Task):
    """Cross-entropy of logits [B, C] and int64 classes [B]; a batch is (inputs, classes).

    The loss is computed in float32 whatever the model's precision. It alone is reported unless the recipe
    names metrics, e.g. ["accuracy", "top5"].
    """

    compiles = ("sum_of_losses",)

    def __init__(
        self,
        *,
        label_smoothing: Annotated[
            float, Field(ge=0, lt=1, description="Probability spread evenly over all classes.")
        ] = 0.0,
        metrics: Annotated[Sequence[Metric], Field(description="What to report beside the loss.")] = (),
    ) -> None:
        self.label_smoothing = label_smoothing
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed cross-entropy, and the logits."""
        inputs, classes = pair(batch, "classification", "(inputs, classes)")
        logits = one_tensor(model(inputs), "classification")
        try:
            loss = self.sum_of_losses(logits, classes)
        except (IndexError, RuntimeError, ValueError) as error:
            refuse_targets(error, "classification", logits, classes)
        return loss, logits

    def sum_of_losses(self, logits: Tensor, classes: Tensor) -> Tensor:
        """The cross-entropy, in float32."""
        return F.cross_entropy(logits.float(), classes, reduction="sum", label_smoothing=self.label_smoothing)

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | Rows]:
        """The metrics that the recipe names."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The most probable `class`, its `probability`, and where the batch has it the true class, `target`."""
        inputs, classes = parts_of(batch)
        return beside_targets(chosen(one_tensor(model(inputs), "classification")), classes)

    def check(self, model: nn.Module, data: Data) -> None:
        """Compares `data.classes` with `model.outputs`, where both are known."""
        classes, outputs = getattr(data, "classes", None), getattr(model, "outputs", None)
        if classes is not None and outputs is not None and classes > outputs:
            raise ValueError(
                f"the data has {classes} classes and the model {outputs} outputs; set model.classes = {classes}, or "
                "the option of the model that decides it"
            )


def chosen(logits: Tensor) -> dict[str, Tensor]:
    """The most probable class of each sample, and its probability."""
    probability, found = logits.float().softmax(dim=1).max(dim=1)
    return {"class": found, "probability": probability}
