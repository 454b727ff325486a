"""BatchNorm: averages its statistics over virtual ranks, and refuses micro-batches that are too small for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpforge import compat
from ddpforge.data import MicroBatch
from ddpforge.errors import UsageError
from ddpforge.training.features import Assembled, Feature
from ddpforge.training.parameter_groups import freeze_batchnorm_statistics
from ddpforge.training.stages import Built
from ddpforge.training.updates import batches_per_step

__all__ = ["BatchNorm", "BatchNormAverager", "watch_batchnorm"]


class BatchNorm(Feature):
    """Statistics of BatchNorm that do not depend on the number of ranks, with `train.virtual_ranks`.

    In every run it watches for micro-batches that are too small for BatchNorm.
    """

    @staticmethod
    @override
    def rework(parts: Built, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        if parts.recipe.train.sync_batchnorm:
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        freeze_batchnorm_statistics(model, parts.recipe.train.freeze)
        return model

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature for a run with virtual ranks."""
        if not run.trains:
            return None
        total, updates = run.parts.plan.horizon.total, run.parts.updates
        full, last = run.parts.training.fewest(total and total * batches_per_step(updates))
        watch_batchnorm(run.replica.unwrapped, full, last)
        return cls() if run.parts.recipe.train.virtual_ranks else None

    @override
    def start(self, stateful: nn.Module) -> None:
        self._averager = BatchNormAverager(stateful)

    @override
    def before_pass(self, micro: MicroBatch) -> None:
        self._averager.enter(micro.shard)

    @override
    def after_passes(self) -> None:
        self._averager.leave()


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
