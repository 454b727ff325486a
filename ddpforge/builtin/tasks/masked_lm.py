"""Predicting tokens that are masked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.builtin.tasks.forms import IGNORED, by_name, cross_entropy
from ddpforge.builtin.tasks.language_modelling import of_sequences
from ddpforge.builtin.tasks.sequences import check_sizes, lengths_of, logits_of, tokens_of
from ddpforge.interfaces import Data, Metric, Rows, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class MaskedLM(Task):
    """Cross-entropy of chosen tokens, of which a model sees the others; as in BERT (Devlin et al., 2019).

    A batch is tokens [B, T], a pair that begins with them, or {input_ids, attention_mask} for a model of transformers.
    Of each sample `mlm_probability` of the tokens are chosen, one at least; they become `mask_token`, but for `keep` of
    them, which stay. The loss is in nats per chosen token, in float32; beside it is reported its exponential,
    `perplexity`. Which tokens are chosen is drawn again in every pass; in evaluation a sample has always the same.
    """

    items = "chosen_tokens"
    compiles = ("sum_of_losses",)

    def __init__(
        self,
        *,
        mask_token: Annotated[int, Field(ge=0, lt=2**24, description="The token that stands for a masked one.")],
        mlm_probability: Annotated[
            float, Field(gt=0, lt=1, description="Share of a sample's tokens to predict.")
        ] = 0.15,
        keep: Annotated[float, Field(ge=0, lt=1, description="Share of those that the model sees all the same.")] = 0.1,
        metrics: Annotated[Sequence[Metric], Field(description="What to report of the chosen tokens.")] = (),
    ) -> None:
        self.mask_token, self.mlm_probability, self.keep = mask_token, mlm_probability, keep
        self.reports = by_name(metrics, "perplexity")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The cross-entropy summed over chosen tokens; the logits, and the targets, -100 where nothing is chosen."""
        tokens, mask = tokens_of(batch, "masked_lm")
        draws = self.draws.rand(*tokens.shape, device=tokens.device)
        if mask is not None:
            draws = draws.masked_fill(mask == 0, 2.0)
        rank = draws.argsort(dim=1).argsort(dim=1)
        chosen = rank < self._chosen(tokens, mask)[:, None]
        hidden = chosen & (self.draws.rand(*tokens.shape, device=tokens.device) >= self.keep)
        targets = tokens.masked_fill(~chosen, IGNORED)
        logits = logits_of(model, tokens.masked_fill(hidden, self.mask_token), mask, "masked_lm")
        return self.sum_of_losses(logits, targets), (logits, targets)

    def sum_of_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, in float32."""
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """The mean `loss` of a sample's chosen tokens, their number, `tokens`, and `losses` [T]: 0 for the others."""
        _, (logits, targets) = self.loss(model, batch)
        flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return of_sequences(flat.view_as(targets), targets != IGNORED)

    def _chosen(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """The number of chosen tokens of each sample: a function of its length, so that `count` knows it too."""
        return (lengths_of(tokens, mask) * self.mlm_probability).round().clamp(min=1).long()

    def count(self, batch: Any) -> Tensor:
        """The tokens that are chosen."""
        return self._chosen(*tokens_of(batch, "masked_lm")).sum()

    def metrics(self, outputs: tuple[Tensor, Tensor], batch: Any) -> Mapping[str, Total | Rows]:
        """The metrics that the recipe names, of chosen tokens only."""
        if not self.reports:
            return {}
        logits, targets = outputs
        counted = targets != IGNORED
        return {name: metric(logits[counted], targets[counted]) for name, metric in self.reports.items()}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity (infinite where it overflows)."""
        loss = metrics["loss"]
        return metrics | {"perplexity": math.inf if loss > 700 else math.exp(loss)}

    def check(self, model: nn.Module, data: Data) -> None:
        """Compares the sizes of data and model, and asks whether the model knows the mask."""
        check_sizes(model, data)
        known = getattr(getattr(model, "config", model), "vocab_size", None)
        if isinstance(known, int) and self.mask_token >= known:
            more = self.mask_token + 1
            raise ValueError(
                f"mask_token = {self.mask_token} is none of the model's {known} tokens; set model.vocab_size = {more}"
            )
