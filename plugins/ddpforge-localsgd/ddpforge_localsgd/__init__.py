"""Local SGD: every rank trains independently, and the ranks average their weights every `period` steps.

Stich, "Local SGD Converges Fast and Communicates Little" (ICLR 2019), https://arxiv.org/abs/1805.09767. With
`outer_lr` and `outer_momentum` the averaged change is the gradient of an outer optimizer: Douillard et al., "DiLoCo"
(2023), https://arxiv.org/abs/2311.08105.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from ddpforge.errors import StrategyError
from ddpforge.interfaces import (
    CanonicalState,
    Contract,
    FullWeights,
    Replica,
    SavedTensor,
    Strategy,
    TensorShard,
    Unsupported,
)
from ddpforge.strategies import WholeReplica
from pydantic import Field
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["LocalSGD"]

ddpforge_plugin_api = 3

_OUTER = "outer_momentum"  # key in the optimizer state, in addition to those of the recipe's optimizer
_BUCKET = 2**24  # elements per all-reduce


class LocalSGD(Strategy):
    """Strategy with a whole model on every rank; the ranks average their weights every `period` steps.

    Let w be the weights after the last averaging, and d = w - mean of the ranks' weights. An averaging computes
    v = outer_momentum * v + d and sets the weights of all ranks to w - outer_lr * v (with `nesterov`:
    w - outer_lr * (d + outer_momentum * v)). The defaults are plain averaging.

    The ranks also average before every evaluation and checkpoint; the period then starts again. Only then do they also
    average the state of the recipe's optimizer and the statistics of BatchNorm. Otherwise these differ between ranks.
    """

    contract = Contract(
        averages="weights",
        clipping="every rank its own gradient, before its own update",
        accumulation="autograd, in the parameters' .grad",
    )

    def __init__(
        self,
        *,
        period: Annotated[int, Field(ge=1, le=1_000_000, description="Steps between two averagings.")] = 16,
        outer_lr: Annotated[
            float, Field(gt=0, le=10, description="Learning rate of the outer step; DiLoCo: 0.7.")
        ] = 1.0,
        outer_momentum: Annotated[
            float, Field(ge=0, lt=1, description="Momentum of the outer step; DiLoCo: 0.9.")
        ] = 0.0,
        nesterov: Annotated[bool, Field(description="Nesterov momentum in the outer step, as in DiLoCo.")] = False,
    ) -> None:
        if nesterov and not outer_momentum:
            raise ValueError("nesterov needs outer_momentum > 0")
        self.period, self.outer_lr, self.outer_momentum, self.nesterov = period, outer_lr, outer_momentum, nesterov

    # -- before the loop
    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Yields the settings that need more communication in every step."""
        if train.precision == "fp16":
            yield Unsupported(
                "train.precision",
                "fp16 needs one loss scale for all ranks, but under localsgd the ranks do not share gradients",
                ('set train.precision = "bf16"',),
            )
        if train.sync_batchnorm:
            yield Unsupported(
                "train.sync_batchnorm",
                "train.sync_batchnorm makes ranks wait for each other in every layer; localsgd exists to avoid this",
                ("remove train.sync_batchnorm",),
            )

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Copies the weights and buffers of rank 0 to every rank."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.world.global_ranks.broadcast(tensor)
        return _OwnWay(self, model, optimizer)


class _OwnWay(WholeReplica):
    """Replica that updates its weights independently between two averagings.

    The trainer's loss factor is kept: the mean of the ranks' gradients is the gradient of the global batch's mean loss.
    Every token has the same weight, so a rank with more tokens takes larger steps.
    """

    def __init__(self, strategy: LocalSGD, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(strategy, model, optimizer)
        self._strategy, self._ranks = strategy, strategy.world.global_ranks
        self.trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.common = {name: p.detach().clone() for name, p in self.trained.items()}
        kept = self.common.items() if strategy.outer_momentum else ()
        self._momentum = {name: torch.zeros_like(p) for name, p in kept}
        self._since = 0  # steps since the ranks had the same weights
        self._apart = False  # True if optimizer state or buffers may differ between ranks
        self.weights = _Common(self)

    # -- one step
    def step(self) -> Tensor:
        """Clips and updates on this rank; every `period` steps averages the weights.

        Returns the root mean square of the ranks' gradient norms, from an all-reduce of one number. If it is not
        finite, no rank updates.
        """
        self.updated = True
        own = self.norm(self.gradients.collect())
        if self.train.clip_norm is not None:
            self.clip(self.train.clip_norm, own)
        norm = (self._ranks.all_reduce_sum(own.detach().float().square()) / self._ranks.size).sqrt()
        self.precision.update(self.optimizer, norm)
        self.gradients.clear()
        self._since, self._apart = self._since + 1, True
        if self._since == self._strategy.period:
            self._come_together()
        return norm

    @torch.no_grad()
    def _come_together(self) -> None:
        """Averages the weights and takes the outer step; every rank computes it, from the same numbers."""
        if not self._since:
            return
        outer = self._strategy
        weights = {name: weight.detach() for name, weight in self.trained.items()}
        self._average(weights.values())
        for name, mean in weights.items():
            common = self.common[name]
            if not outer.outer_momentum:
                common.lerp_(mean, outer.outer_lr)  # exactly the mean if outer_lr is 1
            else:
                change = common - mean
                momentum = self._momentum[name].mul_(outer.outer_momentum).add_(change)
                step = change.add_(momentum, alpha=outer.outer_momentum) if outer.nesterov else momentum
                common.sub_(step, alpha=outer.outer_lr)
            mean.copy_(common)
        self._since = 0

    def sync_buffers(self) -> None:
        """Makes weights, buffers and optimizer state equal on all ranks; called before evaluations and checkpoints."""
        self._come_together()
        if self._apart:
            super().sync_buffers()
            self._average(self._kept())
        self._apart = False

    def _kept(self) -> Iterator[Tensor]:
        """Yields the optimizer state of this rank, in the same order on every rank. Step counts are equal already."""
        for weight in self.trained.values():
            entry = self.optimizer.state.get(weight, {})
            for _, value in sorted(entry.items()):
                if isinstance(value, Tensor) and value.is_floating_point() and value.device == weight.device:
                    yield value

    @torch.no_grad()
    def _average(self, tensors: Iterable[Tensor]) -> None:
        """Replaces each tensor by its mean over all ranks."""
        for bucket in _buckets(tensors):
            mean = self._ranks.all_reduce_sum(torch.cat([tensor.reshape(-1) for tensor in bucket])) / self._ranks.size
            for tensor, part in zip(bucket, torch.split(mean, [each.numel() for each in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    # -- to disk and back
    def state(self) -> CanonicalState[Tensor | TensorShard]:
        """Returns the state, with the outer momentum; raises StrategyError if `sync_buffers` was not called before."""
        if self._since or self._apart:
            raise StrategyError("the ranks have different weights: call `sync_buffers` before `state`")
        state = super().state()
        kept = {name: dict(entry) for name, entry in state.optimizer.items()}
        for name, momentum in self._momentum.items():
            # Zeros are not saved: a run begins with them, and an optimizer without state could take them for its own.
            if momentum.any():
                kept.setdefault(name, {})[_OUTER] = momentum
        return replace(state, optimizer=kept)

    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Reads the whole state on every rank. If another strategy saved it, the outer momentum starts at zero."""
        inner = {name: {k: v for k, v in entry.items() if k != _OUTER} for name, entry in state.optimizer.items()}
        own = replace(state, optimizer={name: entry for name, entry in inner.items() if entry})
        super().load_state(own, partial=partial)
        for name, common in self.common.items():
            common.copy_(self.trained[name].detach())
        self._since, self._apart = 0, False
        for name, momentum in self._momentum.items():
            saved: Any = state.optimizer.get(name, {}).get(_OUTER)
            if saved is not None or not partial:
                momentum.copy_(torch.zeros_like(momentum) if saved is None else saved.read())


class _Common(FullWeights):
    """Weights after the last averaging: equal on all ranks at every step."""

    def __init__(self, replica: _OwnWay) -> None:
        super().__init__(replica.unwrapped, replica.world.global_ranks)
        self._common, self._used = replica.common, replica.trained
        self._parts = {name: part.of(self._common[name]) for name, part in self._parts.items()}

    @torch.no_grad()
    def mark_changed(self) -> None:
        """Copies changed weights to the model of this rank."""
        for name, tensor in self._common.items():
            self._used[name].copy_(tensor)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields the tensors in lists of one dtype, with at most `_BUCKET` elements unless a single tensor has more."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        bucket = by_dtype.setdefault(tensor.dtype, [])
        if bucket and sum(each.numel() for each in bucket) + tensor.numel() > _BUCKET:
            yield bucket
            by_dtype[tensor.dtype] = bucket = []
        bucket.append(tensor)
    yield from by_dtype.values()
