"""Regression: prediction of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import (
    Metrics,
    beside_targets,
    by_name,
    one_tensor,
    pair,
    parts_of,
    reject_target_kind,
)
from ddpforge.interfaces import Data, SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Regression(Task):
    """Error of predictions, averaged over the values of a sample and over samples.

    A batch is (inputs, targets [B, ...]). The shapes of predictions and targets may differ in dimensions of size 1,
    e.g. [B, 1] and [B]; nothing is broadcast. The loss is computed in float32 for any precision of the model. Only the
    loss is reported, unless the recipe names metrics, e.g. ["mae"].

    Raises ValueError if `delta` is set and the loss is not "huber".
    """

    def __init__(
        self,
        *,
        loss: Annotated[
            Literal["mse", "mae", "huber"],
            Field(description="Squared error, absolute error, or squared error up to `delta` and linear above it."),
        ] = "mse",
        delta: Annotated[
            float | None, Field(ge=1e-9, le=1e6, description='Error above which "huber" is linear; absent: 1.')
        ] = None,
        metrics: Metrics = (),
    ) -> None:
        from torch import nn

        if delta is not None and loss != "huber":
            raise ValueError(f'delta: only loss = "huber" has this option, not "{loss}"')
        self._errors: nn.Module = {
            "mse": nn.MSELoss(reduction="none"),
            "mae": nn.L1Loss(reduction="none"),
            "huber": nn.HuberLoss(reduction="none", delta=delta or 1.0),
        }[loss]
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the summed error, and the predictions in the targets' shape; raises ValueError if they do not fit."""
        inputs, targets = pair(batch, "regression", "(inputs, targets)")
        predictions = one_tensor(model(inputs), "regression")
        if _sizes(predictions) != _sizes(targets):
            raise ValueError(
                f"predictions of shape {list(predictions.shape)} cannot be compared with targets of shape"
                f" {list(targets.shape)}: the shapes may differ only in dimensions of size 1"
            )
        predictions = predictions.reshape(targets.shape)
        return self.loss_from_outputs(predictions, batch), predictions

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the summed error."""
        errors = self._errors(outputs.float(), batch[1].float())
        error: Tensor = errors.reshape(len(errors), -1).mean(dim=1).sum()
        return error

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | SampleColumns]:
        """Returns the recipe's metrics."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns the `prediction`, in the shape of the targets, and the targets as `target` if the batch has them."""
        inputs, targets = parts_of(batch)
        predictions = one_tensor(model(inputs), "regression").float()
        if targets is not None and _sizes(predictions) == _sizes(targets):
            predictions = predictions.reshape(targets.shape)
        return beside_targets({"prediction": predictions}, targets)

    def check(self, model: nn.Module, data: Data) -> None:
        """Raises UsageError if the targets are class numbers."""
        reject_target_kind(data, "class", "regression", "numbers")


def _sizes(values: Tensor) -> list[int]:
    """Returns the number of samples, and the sizes of a sample's dimensions without those of size 1."""
    return [len(values), *(size for size in values.shape[1:] if size != 1)]
