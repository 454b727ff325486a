"""Accuracy metrics of classifiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ddpforge.interfaces import Metric, Total

if TYPE_CHECKING:
    from torch import Tensor


class TopK(Metric):
    """Fraction of samples with the target class among the `k` largest logits, reported as `top<k>`.

    Takes logits [..., C] and int64 classes [...]. Every target counts; a negative one is a miss.
    """

    lower_is_better = False

    def __init__(
        self,
        *,
        k: Annotated[
            int, Field(ge=1, le=2**20, description="A sample is a hit if its class is among the k largest logits.")
        ],
    ) -> None:
        self.k = k
        self.name = f"top{k}"

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """Returns the number of hits and of targets; raises ValueError if there are fewer than `k` classes."""
        import torch

        if outputs.shape[-1] < self.k:
            raise ValueError(f"{self.name} needs at least {self.k} classes, but the outputs have {outputs.shape[-1]}")
        hits = outputs.topk(self.k, dim=-1).indices == targets.unsqueeze(-1)
        return Total(hits.sum(dtype=torch.float32), targets.numel())


class Top5(TopK):
    """Fraction of samples with the target class among the five largest logits; see `TopK`."""

    def __init__(self) -> None:
        super().__init__(k=5)


class Accuracy(Metric):
    """Fraction of samples with the largest logit at the target class.

    Takes logits [..., C] and int64 classes [...]. Every target counts; a negative one is a miss.
    """

    name = "accuracy"
    lower_is_better = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Total:
        """Returns the number of hits and of targets."""
        import torch

        hits = outputs.argmax(dim=-1) == targets
        return Total(hits.sum(dtype=torch.float32), targets.numel())
