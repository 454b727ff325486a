"""This rank's parts of sharded weights, and tensors laid out like them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ddpforge.interfaces import Part, PartWeights, Range

__all__ = ["Shards", "local", "part_of", "parts_of", "reshard", "shard_like"]


class Shards(PartWeights):
    """Weights that are DTensors."""

    def __init__(self, model: nn.Module) -> None:
        # A forward pass without backward leaves gathered weights in the model, so the shards are remembered here.
        super().__init__(model, part_of)
        self._model = model

    def changed(self) -> None:
        """Drops what was gathered before the change."""
        reshard(self._model)

    def observing(self) -> AbstractContextManager[Any]:
        """Gives gathered weights back, so that what callbacks see and write are the shards."""
        reshard(self._model)
        return nullcontext()


def reshard(model: nn.Module) -> None:
    """Drops gathered weights: the model's parameters are the shards again, and what is gathered next is their value."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def local(tensors: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards, without gradients."""
    return [cast(DTensor, tensor).to_local().detach() for tensor in tensors]


def parts_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by name, sharded tensors among them as this rank's parts."""
    return {name: part_of(value) if isinstance(value, DTensor) else value for name, value in values.items()}


def part_of(tensor: Tensor) -> Part:
    """This rank's part of a tensor: some rows, if it is sharded."""
    if not isinstance(tensor, DTensor):
        return Part.whole(tensor)
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    (mine,) = local([tensor])
    rows = -(-shape[0] // mesh.size(-1))
    start = min(mesh.get_local_rank(mesh.ndim - 1) * rows, shape[0]) * prod(shape[1:])
    replica, replicas = (mesh.get_local_rank(0), mesh.size(0)) if mesh.ndim == 2 else (0, 1)
    return Part(mine, shape, Range(start, start + mine.numel()), replica, replicas)


def shard_like(mine: Tensor, like: Tensor) -> Tensor:
    """This rank's rows as a tensor that lies on the ranks as `like` does; without communication."""
    if not isinstance(like, DTensor):
        return mine
    return DTensor.from_local(
        mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
