"""Predicting numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import Metrics, beside_targets, by_name, one_tensor, pair, parts_of
from ddpforge.interfaces import Rows, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Regression(Task):
    """The error of predictions: averaged over the values of a sample, summed over samples.

    A batch is (inputs, targets [B, ...]). The shapes of predictions and targets may differ in dimensions of
    size 1, as [B, 1] and [B] do; nothing is broadcast. The loss is computed in float32 whatever the model's
    precision. It alone is reported unless the recipe names metrics, e.g. ["mae"].

    Raises ValueError when `delta` is set for a loss other than "huber".
    """

    def __init__(
        self,
        *,
        loss: Annotated[
            Literal["mse", "mae", "huber"],
            Field(description="Squared error, absolute error, or squared up to `delta` and linear beyond."),
        ] = "mse",
        delta: Annotated[
            float | None, Field(ge=1e-9, le=1e6, description='Where "huber" turns linear; absent: 1.')
        ] = None,
        metrics: Metrics = (),
    ) -> None:
        from torch import nn

        if delta is not None and loss != "huber":
            raise ValueError(f'delta: it belongs to loss = "huber", not to "{loss}"')
        self._errors: nn.Module = {
            "mse": nn.MSELoss(reduction="none"),
            "mae": nn.L1Loss(reduction="none"),
            "huber": nn.HuberLoss(reduction="none", delta=delta or 1.0),
        }[loss]
        self.reports = by_name(metrics)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """The summed error, and the predictions in the targets' shape; ValueError when they do not fit it."""
        inputs, targets = pair(batch, "regression", "(inputs, targets)")
        predictions = one_tensor(model(inputs), "regression")
        if _sizes(predictions) != _sizes(targets):
            raise ValueError(
                f"predictions of shape {list(predictions.shape)} cannot be compared with targets of shape"
                f" {list(targets.shape)}: they may differ in dimensions of size 1 only"
            )
        predictions = predictions.reshape(targets.shape)
        errors = self._errors(predictions.float(), targets.float())
        return errors.reshape(len(errors), -1).mean(dim=1).sum(), predictions

    def metrics(self, outputs: Tensor, batch: Batch) -> Mapping[str, Total | Rows]:
        """The metrics that the recipe names."""
        return {name: metric(outputs, batch[1]) for name, metric in self.reports.items()}

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The `prediction`, in the shape of the targets, and these, `target`, where the batch has them."""
        inputs, targets = parts_of(batch)
        predictions = one_tensor(model(inputs), "regression").float()
        if targets is not None and _sizes(predictions) == _sizes(targets):
            predictions = predictions.reshape(targets.shape)
        return beside_targets({"prediction": predictions}, targets)


def _sizes(values: Tensor) -> list[int]:
    """Samples, and the sizes of a sample's dimensions that are not 1."""
    return [len(values), *(size for size in values.shape[1:] if size != 1)]
