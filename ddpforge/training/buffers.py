"""Buffers that forward passes change: copies, and their restoration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["Buffers", "buffers_of", "unchanged"]


def buffers_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers of one module under all of their names."""
    return module.named_buffers(recurse=False, remove_duplicate=False)


class Buffers:
    """Copy of the current values of a model's buffers, to restore them later."""

    def __init__(self, model: nn.Module) -> None:
        named = ((module, *one) for module in model.modules() for one in buffers_of(module))
        self._values = [(module, name, buffer.clone()) for module, name, buffer in named]

    def restore(self) -> None:
        """Restores all buffers."""
        for module, name, value in self._values:
            # By name: some modules replace a buffer in forward. `data`: autograd does not count this as a change.
            module.get_buffer(name).data.copy_(value)

    def restore_unless_finite(self, norm: Tensor) -> None:
        """Restores all buffers unless `norm` (0-d, on any device) is finite; does not wait for the device."""
        if not self._values:  # the check is two launches
            return
        kept = torch.isfinite(norm)
        for module, name, value in self._values:
            buffer = module.get_buffer(name)
            buffer.data.copy_(torch.where(kept.to(buffer.device, non_blocking=True), buffer, value))


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Restores the model's buffers at the end of the block."""
    before = Buffers(model)
    yield
    before.restore()
