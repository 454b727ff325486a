"""Language modeling: prediction of the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import (
    IGNORED,
    IgnoredTarget,
    LabelSmoothing,
    ZLoss,
    cross_entropy,
    one_tensor,
    pair,
    reject_targets,
)
from ddpforge.interfaces import Data, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class LanguageModeling(Task):
    """Cross-entropy of logits [B, T, V] and int64 tokens [B, T]; a batch is (tokens, targets).

    Every target has the same weight, for any distribution over micro-batches and ranks; targets equal to `ignore_index`
    have none. The loss is in nats per token, computed in float32 for any precision of the model. Also reported:
    `perplexity`, the exponential of the loss, and `bits_per_token`, the loss divided by ln 2 (`bits_per_byte` if the
    data has `level = "bytes"`). With `label_smoothing` or `z_loss` these two are absent: the loss is then no
    cross-entropy of the data.

    With `loss_chunk` only some of the logits are in memory at a time. The model must have `takes_loss_function = True`;
    its forward pass calls the loss with the hidden states and the weights of the output layer: `model(tokens,
    loss_function=…)`.
    """

    items = "tokens"
    predicts_next_token = True
    by_position = True
    compiles = ("sum_of_losses",)
    takes_split_logits = True

    def __init__(
        self,
        *,
        ignore_index: IgnoredTarget = IGNORED,
        label_smoothing: LabelSmoothing = 0.0,
        loss_chunk: Annotated[
            int | None,
            Field(
                ge=1,
                le=2**24,
                description="Number of targets with logits in memory at the same time, e.g. 1024; absent: all.",
            ),
        ] = None,
        z_loss: ZLoss = None,
    ) -> None:
        self.ignore_index, self.loss_chunk, self.label_smoothing = ignore_index, loss_chunk, label_smoothing
        self.z_loss = z_loss
        if label_smoothing or z_loss:
            self.takes_split_logits = False
        self.loss_in_model = loss_chunk is not None
        self._unit = "token"

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns the summed cross-entropy, and the logits (None with `loss_chunk`)."""
        tokens, targets = pair(batch, "language_modeling", "(tokens, targets)")
        if self.loss_chunk is not None:
            from ddpforge.builtin.tasks.chunked import chunked_cross_entropy  # imports torch

            loss_function = partial(
                chunked_cross_entropy,
                targets=targets,
                chunk=self.loss_chunk,
                ignore_index=self.ignore_index,
                task="language_modeling",
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss or 0.0,
            )
            return model(tokens, loss_function=loss_function), None
        logits = one_tensor(model(tokens), "language_modeling")
        return self.cross_entropy(logits, targets), logits

    def loss_from_outputs(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Returns the summed cross-entropy."""
        return self.cross_entropy(outputs, batch[1])

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the summed cross-entropy; raises UsageError for targets that the logits do not have."""
        try:
            return self.sum_of_losses(logits, targets)
        except (IndexError, RuntimeError, ValueError) as error:
            reject_targets(error, "language_modeling", logits, targets)

    def sum_of_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the summed cross-entropy, in float32."""
        return cross_entropy(
            logits.flatten(0, -2),
            targets.flatten(),
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss or 0.0,
        )

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Returns per sample the mean `loss`, the number of counted `tokens`, and their `losses` [T], 0 for others."""
        tokens, targets = pair(batch, "language_modeling", "(tokens, targets)")
        outputs = model(tokens)
        logits = one_tensor(getattr(outputs, "logits", outputs), "language_modeling")
        losses = cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        return of_sequences(losses.view_as(targets), targets != self.ignore_index)

    def count(self, batch: Batch) -> Tensor:
        """Returns the number of targets that are not `ignore_index`."""
        _, targets = pair(batch, "language_modeling", "(tokens, targets)")
        return (targets != self.ignore_index).sum()

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds perplexity (infinite on overflow) and bits per token or byte; not with label_smoothing or z_loss."""
        if self.label_smoothing or self.z_loss:
            return metrics
        loss = metrics["loss"]
        perplexity = math.inf if loss > 700 else math.exp(loss)
        return metrics | {"perplexity": perplexity, f"bits_per_{self._unit}": loss / math.log(2)}

    def check(self, model: nn.Module, data: Data) -> None:
        """Raises ValueError if the data does not fit the model, or without the model's `takes_loss_function`."""
        if self.loss_chunk is not None and not getattr(model, "takes_loss_function", False):
            raise ValueError(
                f"task.loss_chunk = {self.loss_chunk} computes the loss within the model's forward pass, but "
                f"{type(model).__name__} does not support this: remove loss_chunk, or return loss_function(hidden, "
                "weight) instead of logits from forward(tokens, loss_function=None) and set takes_loss_function = True "
                "in the model"
            )
        for name, noun in (("vocab_size", "different tokens"), ("block_size", "tokens per sample")):
            has, takes = getattr(data, name, None), getattr(model, name, None)
            if has is not None and takes is not None and has > takes:
                raise ValueError(f"the data has {has} {noun}, but the model takes {takes}; set model.{name} = {has}")
        self._unit = "byte" if getattr(data, "level", None) == "bytes" else "token"


def of_sequences(losses: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """Returns prediction columns of sequences from the losses of tokens [B, T] and the mask `counted` [B, T]."""
    if hasattr(losses, "full_tensor"):  # the logits are sharded
        losses = losses.full_tensor()
    tokens = counted.sum(dim=1)
    return {"loss": losses.sum(dim=1) / tokens, "tokens": tokens, "losses": losses}
