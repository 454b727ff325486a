"""BatchNorm's running statistics where one rank computes several shards of a step, one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["Statistics"]


class Statistics:
    """Makes the running statistics what they would be, on average, if every shard had a rank of its own.

    A rank of its own would update its statistics with its shard's batches only. An update is linear in what it
    updates, so each shard begins with the rank's statistics, and what comes of them is averaged.
    """

    def __init__(self, model: nn.Module | None) -> None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)] if model else []
        kept = [x for norm in norms for x in (norm.running_mean, norm.running_var) if x is not None]
        counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._averaged: list[Tensor] = kept
        self._all: list[Tensor] = kept + counts
        self._shard: int | None = None

    def enter(self, shard: int) -> None:
        """Before each micro-batch."""
        if not self._all or shard == self._shard:
            return
        if self._shard is None:
            self._begun = [x.clone() for x in self._all]
            self._sums: list[Tensor] = []
            self._shards = 0
        else:
            self._collect()
            torch._foreach_copy_(self._all, self._begun)
        self._shard = shard

    def leave(self) -> None:
        """After the step's last micro-batch."""
        if self._shard is None:
            return
        self._collect()
        torch._foreach_copy_(self._averaged, self._sums)
        torch._foreach_div_(self._averaged, self._shards)
        self._shard = None

    def _collect(self) -> None:
        self._shards += 1
        if self._sums:
            torch._foreach_add_(self._sums, self._averaged)
        else:
            self._sums = [x.clone() for x in self._averaged]
