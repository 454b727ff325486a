"""Predicting the next token."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import IGNORED, IgnoredTarget, cross_entropy, one_tensor, pair, refuse_targets
from ddpforge.interfaces import Data, Task

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class LanguageModelling(Task):
    """Cross-entropy of logits [B, T, V] and int64 tokens [B, T]; a batch is (tokens, targets).

    Every target weighs the same, however they are spread over micro-batches and ranks; those equal to
    `ignore_index` weigh nothing. The loss is in nats per token, computed in float32 whatever the model's
    precision. Beside it are reported its exponential, `perplexity`, and the loss divided by ln 2,
    `bits_per_token` (`bits_per_byte` where the data says that its tokens are bytes).

    With `loss_chunk` logits are never all in memory: the model, which must say `takes_score`, calls the loss within its
    forward pass, `model(tokens, score=…)`, with its hidden states and the weights of its output layer.
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
        loss_chunk: Annotated[
            int | None,
            Field(
                ge=1,
                le=2**24,
                description="Targets whose logits are in memory at a time, e.g. 1024; absent: all of a micro-batch.",
            ),
        ] = None,
    ) -> None:
        self.ignore_index, self.loss_chunk = ignore_index, loss_chunk
        self.scores_in_model = loss_chunk is not None
        self._unit = "token"

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The cross-entropy summed over targets, and the logits; with `loss_chunk` there are none."""
        tokens, targets = pair(batch, "language_modeling", "(tokens, targets)")
        if self.loss_chunk is not None:
            from ddpforge.builtin.tasks.chunked import chunked_cross_entropy  # which needs torch to be imported

            score = partial(
                chunked_cross_entropy,
                targets=targets,
                chunk=self.loss_chunk,
                ignore_index=self.ignore_index,
                task="language_modeling",
            )
            return model(tokens, score=score), None
        logits = one_tensor(model(tokens), "language_modeling")
        return self.cross_entropy(logits, targets), logits

    def cross_entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed over the targets that count."""
        try:
            return self.sum_of_losses(logits, targets)
        except (IndexError, RuntimeError, ValueError) as error:
            refuse_targets(error, "language_modeling", logits, targets)

    def sum_of_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, in float32."""
        return cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index)

    def predict(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """The mean `loss` of a sample, how many of its `tokens` count, and their `losses` [T], 0 for others."""
        tokens, targets = pair(batch, "language_modeling", "(tokens, targets)")
        outputs = model(tokens)
        logits = one_tensor(getattr(outputs, "logits", outputs), "language_modeling")
        losses = cross_entropy(
            logits.flatten(0, -2), targets.flatten(), ignore_index=self.ignore_index, reduction="none"
        )
        return of_sequences(losses.view_as(targets), targets != self.ignore_index)

    def count(self, batch: Batch) -> Tensor:
        """The targets that are not ignored."""
        _, targets = pair(batch, "language_modeling", "(tokens, targets)")
        return (targets != self.ignore_index).sum()

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds perplexity (infinite where it overflows) and bits."""
        loss = metrics["loss"]
        perplexity = math.inf if loss > 700 else math.exp(loss)
        return metrics | {"perplexity": perplexity, f"bits_per_{self._unit}": loss / math.log(2)}

    def check(self, model: nn.Module, data: Data) -> None:
        """Compares `vocab_size` and `block_size` of data and model, where both are known; asks for `takes_score`."""
        if self.loss_chunk is not None and not getattr(model, "takes_score", False):
            raise ValueError(
                f"task.loss_chunk = {self.loss_chunk} computes the loss within the model's forward pass, and "
                f"{type(model).__name__} does not take it there: leave it out, or let forward(tokens, score=None) "
                "return score(hidden, weight) in place of logits, and the model say takes_score = True"
            )
        for name, noun in (("vocab_size", "different tokens"), ("block_size", "tokens per sample")):
            has, takes = getattr(data, name, None), getattr(model, name, None)
            if has is not None and takes is not None and has > takes:
                raise ValueError(f"the data has {has} {noun}, but the model takes {takes}; set model.{name} = {has}")
        self._unit = "byte" if getattr(data, "level", None) == "bytes" else "token"


def of_sequences(losses: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """The columns of a prediction of sequences, from the losses of their tokens [B, T] and those that count."""
    if hasattr(losses, "full_tensor"):  # where ranks have parts of the logits
        losses = losses.full_tensor()
    tokens = counted.sum(dim=1)
    return {"loss": losses.sum(dim=1) / tokens, "tokens": tokens, "losses": losses}
