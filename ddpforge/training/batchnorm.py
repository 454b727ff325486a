"""Buffers that forward passes change: restores their values, and averages BatchNorm statistics over virtual ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge import compat
from ddpforge.errors import UsageError

__all__ = ["BatchNormAverager", "Buffers", "buffers_of", "unchanged", "watch_batchnorm"]


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


class BatchNormAverager:
    """Averages BatchNorm's running statistics over the virtual ranks (shards) of a rank.

    Each shard begins a step with the rank's statistics, and updates them with its own batches only. The results are
    averaged after the step. Updates are linear, so this is the mean over ranks with one shard each.
    """

    def __init__(self, model: nn.Module | None) -> None:
        norms: list[Any] = [one for one in model.modules() if isinstance(one, compat.batch_norms())] if model else []
        kept = [x for norm in norms for x in (norm.running_mean, norm.running_var) if x is not None]
        counts = [norm.num_batches_tracked for norm in norms if norm.num_batches_tracked is not None]
        self._averaged: list[Tensor] = kept
        self._all: list[Tensor] = kept + counts
        self._shard: int | None = None

    def enter(self, shard: int) -> None:
        """Switches to the statistics of `shard`; called before each micro-batch."""
        if not self._all or shard == self._shard:
            return
        if self._shard is None:
            self._begun = [x.clone() for x in self._all]
            self._sums: list[Tensor] = []
            self._shards = 0
        else:
            self._collect()
            compat.foreach("copy_", self._all, self._begun)
        self._shard = shard

    def leave(self) -> None:
        """Sets the statistics to their mean over shards; called after the last micro-batch of a step."""
        if self._shard is None:
            return
        self._collect()
        compat.foreach("copy_", self._averaged, self._sums)
        compat.foreach("div_", self._averaged, self._shards)
        self._shard = None

    def _collect(self) -> None:
        self._shards += 1
        if self._sums:
            compat.foreach("add_", self._sums, self._averaged)
        else:
            self._sums = [x.clone() for x in self._averaged]


def watch_batchnorm(model: nn.Module, full: int, last: int) -> None:
    """Makes the first training pass raise UsageError for a BatchNorm if a later micro-batch is too small for it.

    `full` and `last` are the sizes of the smallest micro-batch of a full step, and of the last step of an epoch.
    """
    # BatchNorm needs two values per channel: two samples, or one with several values (pixels). The first batch shows
    # how many values a sample has.
    if min(full, last) > 1:
        return
    hints = ["set train.drop_last = true", "or a train.global_batch that leaves a larger last batch"]
    if full <= 1:
        hints = ["set train.micro_batch to 2 or more, and train.global_batch to twice the ranks or more"]
    for name, module in model.named_modules():
        if isinstance(module, compat.batch_norms()) and not isinstance(module, nn.SyncBatchNorm):
            _watch(name, module, hints)


def _watch(name: str, module: nn.Module, hints: list[str]) -> None:
    called = f"`{name}`" if name else "the model"

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not module.training:
            return
        handle.remove()
        if inputs[0].numel() == inputs[0].shape[0] * inputs[0].shape[1]:
            raise UsageError(
                f"{called} ({type(module).__name__}) normalizes over the samples of a micro-batch, but some "
                "micro-batches have one sample",
                hints=hints,
            )

    handle = module.register_forward_pre_hook(torch.compiler.disable(look))  # type: ignore[no-untyped-call]
