"""This rank's parts of sharded weights, and tensors that are distributed like them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ddpforge import compat
from ddpforge.interfaces import FlatRange, Ranks, ShardedWeights, TensorShard
from ddpforge.strategies.optimizer_probe import check_same_update
from ddpforge.strategies.parameter_guard import PartialWeights
from ddpforge.strategies.tensor.split_spec import SplitSpec

__all__ = [
    "DTensorWeights",
    "ShardLayout",
    "clip_local",
    "local",
    "reshard",
    "rows_of",
    "shard_like",
    "shard_of",
    "try_on_shards",
]


class ShardLayout:
    """Distribution of a model's tensors by name, under tensor or expert parallelism.

    `cuts` are this rank's cuts of the tensors that are split over ranks; all others are whole on each of the `tensor`
    ranks. FSDP shards both.
    """

    def __init__(self, cuts: Mapping[str, SplitSpec], tensor: Ranks) -> None:
        self.cuts, self._tensor = cuts, tensor

    def part(self, name: str, tensor: Tensor) -> TensorShard:
        """Returns this rank's part of a tensor that is distributed like the parameter `name`."""
        found = shard_of(tensor)
        if not isinstance(tensor, DTensor):
            return found
        if cut := self.cuts.get(name):
            return TensorShard(found.tensor, cut.shape, cut.region(*rows_of(tensor)), found.replica, found.replicas)
        if self._tensor.size == 1:
            return found
        replica, replicas = found.replica * self._tensor.size + self._tensor.rank, found.replicas * self._tensor.size
        return replace(found, replica=replica, replicas=replicas)

    def parts(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tensors by name, with sharded tensors replaced by this rank's parts."""
        return {name: self._held(name, value) for name, value in values.items()}

    def state(self, owner: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the optimizer state of a parameter, with sharded tensors replaced by this rank's parts."""
        return {key: self._held(owner, value) for key, value in values.items()}

    def _held(self, name: str, value: Any) -> Any:
        return self.part(name, value) if isinstance(value, DTensor) else value


class DTensorWeights(ShardedWeights):
    """Weights that are DTensors; `partial` refuses reads of their values."""

    def __init__(
        self, model: nn.Module, part_of: Callable[[str, Tensor], TensorShard], partial: PartialWeights
    ) -> None:
        # A forward pass without backward leaves gathered weights in the model, so this object keeps the shards.
        super().__init__(model, part_of)
        self._model, self._partial = model, partial

    def mark_changed(self) -> None:
        """Drops weights that were gathered before the change."""
        reshard(self._model)

    def callback_guard(self) -> AbstractContextManager[Any]:
        """Drops gathered weights, so that callbacks read and write the shards."""
        reshard(self._model)
        return nullcontext()

    def whole_guard(self) -> AbstractContextManager[Any]:
        """Raises StrategyError for reads of sharded weights, which look like whole ones."""
        return self._partial.refused()


def reshard(model: nn.Module) -> None:
    """Drops gathered weights: the model's parameters are the shards again, and the next pass gathers their values."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Returns this rank's shards, detached; tensors that are not sharded stay whole."""
    return [(tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach() for tensor in tensors]


def clip_local(parameters: Iterable[Tensor], largest: float, norm: Tensor) -> None:
    """Scales this rank's shards of gradients from the norm `norm` over all ranks to `largest`, by torch's formula."""
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)
    shards = local(parameter.grad for parameter in parameters if parameter.grad is not None)
    compat.foreach("mul_", shards, factor.to(shards[0].device))


def shard_of(tensor: Tensor) -> TensorShard:
    """Returns this rank's part of a tensor: some rows if FSDP shards it, otherwise all of it."""
    if not isinstance(tensor, DTensor):
        return TensorShard.whole(tensor)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    (mine,) = local([tensor])
    start = rows_of(tensor)[0] * prod(shape[1:])
    replica, replicas = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim == 2 else (0, 1)
    return TensorShard(mine, shape, FlatRange(start, start + mine.numel()), replica, replicas)


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """Returns the first row of a tensor on this rank, and the end of its rows (exclusive)."""
    mesh, rows = tensor.device_mesh, len(tensor)
    each = -(-rows // mesh.size(-1))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * each, rows)
    return start, min(start + each, rows)


def shard_like(mine: Tensor, like: Tensor) -> Tensor:
    """Returns this rank's rows as a tensor that is distributed like `like`; without communication."""
    if not isinstance(like, DTensor):
        return mine
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def try_on_shards(optimizer: Optimizer, mesh: DeviceMesh, device: torch.device) -> None:
    """Raises StrategyError if the optimizer updates shards of a weight differently from the whole weight."""
    check_same_update(
        optimizer,
        device,
        [lambda whole: _sharded(whole, mesh)],
        fails="cannot be used under FSDP, which shards weights",
        differs="updates a sharded weight differently from a whole one",
        hints=['set strategy.use = "ddp", or use AdamW, SGD or another element-wise optimizer'],
        rows=2 * mesh.size(-1),
    )


def _sharded(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """Returns a weight that every rank holds, sharded over the ranks as FSDP does it."""
    rows = len(whole) // mesh.size(-1)
    mine = whole[mesh.get_local_rank(mesh.ndim - 1) * rows :][:rows].clone()
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    return DTensor.from_local(mine, mesh, placements, run_check=False)
