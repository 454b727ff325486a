"""Makes a model's buffers equal on ranks that saw different data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ddpforge import compat
from ddpforge.interfaces import Ranks

__all__ = ["equalise_buffers"]


def equalise_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Averages BatchNorm's running statistics over ranks, and sets other buffers to rank 0's values."""
    if ranks.size == 1:
        return
    averaged = {id(buffer) for buffer in _running_statistics(model)}
    for buffer in model.buffers():
        if id(buffer) in averaged:
            # Running statistics are linear in the batches, so the time of averaging does not change the result.
            buffer.copy_(ranks.all_reduce_sum(buffer) / ranks.size)
        else:
            ranks.broadcast(buffer)


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    """Yields the running means and variances of all BatchNorm layers."""
    for module in model.modules():
        if isinstance(module, compat.batch_norms()):
            norm: Any = module
            yield from (buffer for buffer in (norm.running_mean, norm.running_var) if buffer is not None)
