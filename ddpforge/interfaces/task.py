"""Tasks, which define what is learnt, the metrics they report, and the totals both are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Metric", "Task", "Total"]


@dataclass(frozen=True, slots=True)
class Total:
    """A quantity on its way to a mean: add up `sum` and `count` over batches and ranks, divide once at the end.

    Both are added up in float64, whatever their dtype. Ranks may name different quantities.
    """

    sum: Tensor
    count: Tensor | int


class Metric(ABC):
    """A quantity worth averaging over samples, computed from a task's outputs."""

    name: str

    @abstractmethod
    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """The sum over the batch and how many items it covers; no gradients, no waiting for the device."""


class Task(ABC):
    """Defines what is learnt: the loss of a batch, and what to report about it.

    A task with `turns` has several updates a step, one after the other, each of its own part of the parameters
    (`[optimizer.turns.NAME]`), e.g. ("discriminator", "generator"). Its `loss` is told which: `loss(model, batch,
    turn)`. What is reported of a turn has its name behind it, "loss/generator", and `loss` is then the sum of all.
    """

    turns: Sequence[str] = ()

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """The loss *summed* over the batch's items (0-d, with gradients), and the outputs that `metrics` reads.

        Return a sum, not a mean: gradients are divided once, by the number of items in the whole global batch,
        so that accumulation, ranks and uneven ends all weigh every item the same.
        """

    def count(self, batch: Any) -> Tensor | None:
        """Counts the items that the loss sums over, or adds their weights (0-d tensor on the batch's own device).

        None means one per sample, which needs no communication. Tasks that weigh tokens, pixels or samples override
        it; weights are real numbers, 0 or more. The batch is still on the CPU when this is called.
        """
        return None

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        """Further quantities of a batch, computed at evaluation and at the steps that log; never for training."""
        return {}

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Turns averaged metrics into what is reported, e.g. adds a perplexity; keys have no `train/` prefix yet."""
        return metrics

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError when model and data cannot belong together (classes, vocabulary), before training."""
