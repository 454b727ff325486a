"""Predicting the next token with a mixture of experts, all of which shall be used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from ddpforge.builtin.tasks.forms import IGNORED, IgnoredTarget, pair
from ddpforge.builtin.tasks.language_modelling import Batch, LanguageModelling
from ddpforge.errors import UsageError
from ddpforge.interfaces import Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class _Outputs(NamedTuple):
    cross_entropy: Tensor
    balance: Tensor  # [B]
    dropped: Tensor  # [B]


class MoELanguageModelling(LanguageModelling):
    """`language_modeling`, and a loss that keeps experts evenly used, for models such as `moe_gpt`.

    To the cross-entropy is added `aux_loss_weight` times the model's own measure of each sequence (1 where experts are
    used evenly), weighted by its targets: the same whatever the ranks and micro-batches. Reported are also
    `cross_entropy` (from which perplexity and bits are), `balance`, and `dropped`: the share of choices that found no
    place.
    """

    by_position = takes_split_logits = False

    def __init__(
        self,
        *,
        ignore_index: IgnoredTarget = IGNORED,
        aux_loss_weight: Annotated[
            float, Field(ge=0, le=100, description="Weight of the measure of balance in the loss.")
        ] = 0.01,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.aux_loss_weight = aux_loss_weight

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """The cross-entropy summed over targets, plus the balance of each sequence times its targets."""
        tokens, targets = pair(batch, "moe_language_modeling", "(tokens, targets)")
        routed = model(tokens)
        if not all(hasattr(routed, name) for name in ("logits", "balance", "dropped")):
            raise UsageError(
                f"task moe_language_modeling needs a model of experts, and {type(model).__name__} does not say how "
                "evenly they are used",
                hints=['set model.use = "moe_gpt"', 'or task.use = "language_modeling"'],
            )
        cross_entropy = self.cross_entropy(routed.logits, targets)
        balance = (routed.balance * self._weights(targets)).sum()
        return cross_entropy + self.aux_loss_weight * balance, _Outputs(cross_entropy, routed.balance, routed.dropped)

    def metrics(self, outputs: _Outputs, batch: Batch) -> Mapping[str, Total]:
        """The parts of the loss, and what was dropped; of the targets, like the loss."""
        weights = self._weights(batch[1])
        count = weights.sum()
        return {
            "cross_entropy": Total(outputs.cross_entropy, count),
            "balance": Total((outputs.balance * weights).sum(), count),
            "dropped": Total(outputs.dropped.sum(), len(weights)),
        }

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds perplexity and bits of the cross-entropy alone."""
        alone = metrics | {"loss": metrics.get("cross_entropy", metrics["loss"])}
        return super().finish(alone) | {"loss": metrics["loss"]}

    def _weights(self, targets: Tensor) -> Tensor:
        """The targets of each sequence that count: [B]."""
        return (targets != self.ignore_index).sum(1).float()
