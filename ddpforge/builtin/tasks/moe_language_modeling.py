"""Language modeling with a mixture of experts and a load-balancing loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import Field

from ddpforge.builtin.tasks.forms import IGNORED, IgnoredTarget, pair
from ddpforge.builtin.tasks.language_modeling import Batch, LanguageModeling
from ddpforge.errors import UsageError
from ddpforge.interfaces import Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class _Outputs(NamedTuple):
    cross_entropy: Tensor
    balance: Tensor  # [B]
    dropped: Tensor  # [B]


class MoELanguageModeling(LanguageModeling):
    """Task `language_modeling` plus a load-balancing loss of the experts, for models such as `moe_gpt`.

    The loss is the cross-entropy plus `aux_loss_weight` times the model's balance of each sequence (1 if
    experts are used evenly), weighted by its number of targets. It does not depend on ranks and micro-batches. Also
    reported: `cross_entropy` (used for perplexity and bits), `balance`, and `dropped`, the fraction of choices
    that exceed the capacity of an expert.
    """

    by_position = takes_split_logits = False

    def __init__(
        self,
        *,
        ignore_index: IgnoredTarget = IGNORED,
        aux_loss_weight: Annotated[float, Field(ge=0, le=100, description="Weight of the load-balancing loss.")] = 0.01,
    ) -> None:
        super().__init__(ignore_index=ignore_index)
        self.aux_loss_weight = aux_loss_weight

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Any]:
        """Returns the summed cross-entropy plus the weighted balance, and the values for `metrics`."""
        tokens, targets = pair(batch, "moe_language_modeling", "(tokens, targets)")
        routed = model(tokens)
        if not all(hasattr(routed, name) for name in ("logits", "balance", "dropped")):
            raise UsageError(
                f"task moe_language_modeling needs a model with experts, but {type(model).__name__} does not return "
                "`balance` and `dropped`",
                hints=['set model.use = "moe_gpt"', 'or task.use = "language_modeling"'],
            )
        cross_entropy = self.cross_entropy(routed.logits, targets)
        balance = (routed.balance * self._weights(targets)).sum()
        return cross_entropy + self.aux_loss_weight * balance, _Outputs(cross_entropy, routed.balance, routed.dropped)

    def metrics(self, outputs: _Outputs, batch: Batch) -> Mapping[str, Total]:
        """Returns the parts of the loss per target, and the dropped fraction."""
        weights = self._weights(batch[1])
        count = weights.sum()
        return {
            "cross_entropy": Total(outputs.cross_entropy, count),
            "balance": Total((outputs.balance * weights).sum(), count),
            "dropped": Total(outputs.dropped.sum(), len(weights)),
        }

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Adds perplexity and bits, computed from the cross-entropy alone."""
        alone = metrics | {"loss": metrics.get("cross_entropy", metrics["loss"])}
        return super().finish(alone) | {"loss": metrics["loss"]}

    def _weights(self, targets: Tensor) -> Tensor:
        """Returns the number of counted targets of each sequence, [B]."""
        return (targets != self.ignore_index).sum(1).float()
