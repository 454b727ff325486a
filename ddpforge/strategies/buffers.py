"""Makes a model's buffers equal on all ranks, each of which has seen other data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ddpforge import compat
from ddpforge.interfaces import Ranks

__all__ = ["equalise_buffers"]


def equalise_buffers(model: nn.Module, ranks: Ranks) -> None:
    """Gives BatchNorm's running statistics their mean over ranks, and other buffers rank 0's values.

    Running statistics are linear in the batches, so when they are averaged does not change what they become.
    """
    if ranks.size == 1:
        return
    averaged = {id(buffer) for buffer in _running_statistics(model)}
    for buffer in model.buffers():
        if id(buffer) in averaged:
            buffer.copy_(ranks.sum(buffer) / ranks.size)
        else:
            ranks.broadcast(buffer)


def _running_statistics(model: nn.Module) -> Iterator[Tensor]:
    """BatchNorm's means and variances."""
    for module in model.modules():
        if isinstance(module, compat.batch_norms()):
            norm: Any = module
            yield from (buffer for buffer in (norm.running_mean, norm.running_var) if buffer is not None)
