"""Masked language modeling: prediction of masked tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.builtin.tasks.forms import IGNORED, LabelSmoothing, by_name, cross_entropy
from ddpforge.builtin.tasks.language_modeling import of_sequences
from ddpforge.builtin.tasks.sequences import check_sizes, lengths_of, logits_of, tokens_of
from ddpforge.interfaces import Data, Metric, SampleColumns, Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class MaskedLM(Task):
    """Cross-entropy of randomly chosen tokens, which are masked in the input, as in BERT (Devlin et al., 2019).

    A batch is tokens [B, T], a pair that begins with them, or {input_ids, attention_mask} for a model of transformers.
    In each sample the fraction `mlm_probability` of the tokens is chosen, at least one. They are replaced by
    `mask_token`, except for the fraction `keep` of them, which stays. The loss is in nats per chosen token, in float32;
    its exponential is reported as `perplexity`. Tokens are chosen anew in every pass; in evaluation they are always the
    same.
    """

    items = "chosen_tokens"
    compiles = ("sum_of_losses",)

    def __init__(
        self,
        *,
        mask_token: Annotated[int, Field(ge=0, lt=2**24, description="Token that replaces a masked token.")],
        mlm_probability: Annotated[
            float, Field(gt=0, lt=1, description="Fraction of a sample's tokens to predict.")
        ] = 0.15,
        keep: Annotated[float, Field(ge=0, lt=1, description="Fraction of chosen tokens that stay.")] = 0.1,
        label_smoothing: LabelSmoothing = 0.0,
        metrics: Annotated[Sequence[Metric], Field(description="Metrics of the chosen tokens to report.")] = (),
    ) -> None:
        self.mask_token, self.mlm_probability, self.keep = mask_token, mlm_probability, keep
        self.label_smoothing = label_smoothing
        self.reports = by_name(metrics, "perplexity")

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the summed cross-entropy of chosen tokens, and (logits, targets); other targets are -100."""
        tokens, mask = tokens_of(batch, "masked_lm")
        draws = self.rng.rand(*tokens.shape, device=tokens.device)
        if mask is not None:
            draws = draws.masked_fill(mask == 0, 2.0)
        rank = draws.argsort(dim=1).argsort(dim=1)
        chosen = rank < self._chosen(tokens, mask)[:, None]
        hidden = chosen & (self.rng.rand(*tokens.shape, device=tokens.device) >= self.keep)
        targets = tokens.masked_fill(~chosen, IGNORED)
        logits = logits_of(model, tokens.masked_fill(hidden, self.mask_token), mask, "masked_lm")
        return self.sum_of_losses(logits, targets), (logits, targets)

    def sum_of_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Returns the summed cross-entropy, in float32."""
        return cross_entropy(logits.flatten(0, 1), targets.flatten(), label_smoothing=self.label_smoothing)

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns per sample the mean `loss`, the number of chosen `tokens`, and their `losses` [T], 0 for others."""
        _, (logits, targets) = self.loss(model, batch)
        flat = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return of_sequences(flat.view_as(targets), targets != IGNORED)

    def _chosen(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """Returns the number of chosen tokens of each sample, [B]."""
        # It depends only on the length, so that `count` can compute it too.
        return (lengths_of(tokens, mask) * self.mlm_probability).round().clamp(min=1).long()

    def count(self, batch: Any) -> Tensor:
        """Returns the number of chosen tokens."""
        return self._chosen(*tokens_of(batch, "masked_lm")).sum()

    def metrics(self, outputs: tuple[Tensor, Tensor], batch: Any) -> Mapping[str, Total | SampleColumns]:
        """Returns the recipe's metrics of the chosen tokens."""
        if not self.reports:
            return {}
        logits, targets = outputs
        counted = targets != IGNORED
        return {name: metric(logits[counted], targets[counted]) for name, metric in self.reports.items()}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds the perplexity (infinite on overflow); not to a smoothed loss."""
        if self.label_smoothing:
            return metrics
        loss = metrics["loss"]
        return metrics | {"perplexity": math.inf if loss > 700 else math.exp(loss)}

    def check(self, model: nn.Module, data: Data) -> None:
        """Raises ValueError if the data exceeds the model's sizes, or `mask_token` is not in its vocabulary."""
        check_sizes(model, data)
        known = getattr(getattr(model, "config", model), "vocab_size", None)
        if isinstance(known, int) and self.mask_token >= known:
            more = self.mask_token + 1
            raise ValueError(
                f"mask_token = {self.mask_token} is not among the model's {known} tokens; set model.vocab_size = {more}"
            )
