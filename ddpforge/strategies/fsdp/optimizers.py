"""An optimizer tried on a sharded weight, before it gets those of a model."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.strategies.fsdp.shards import part_of
from ddpforge.strategies.trial import tried

__all__ = ["try_on_shards"]


def try_on_shards(optimizer: Optimizer, mesh: DeviceMesh, device: torch.device) -> None:
    """Raises StrategyError for an optimizer that does not do with shards what it does with a whole weight."""
    name = type(optimizer).__name__
    hints = ['set strategy.use = "ddp", or use AdamW, SGD or another element-wise optimizer']
    for group in optimizer.param_groups:
        generator = torch.Generator().manual_seed(0)
        rows = 2 * mesh.size(-1)
        values = [torch.randn(rows, 4, generator=generator).to(device) for _ in range(4)]
        whole, _ = tried(optimizer, group, values, values[::-1])
        try:
            sharded = [_sharded(value, mesh) for value in values]
            shards, state = tried(optimizer, group, sharded, sharded[::-1])
        except Exception as error:
            raise StrategyError(
                f"{name} cannot be used under FSDP, which shards weights: {error}", hints=hints
            ) from error
        for key, value in state.items():
            if (shape := tuple(getattr(value, "shape", ()))) not in ((), (rows, 4)):
                raise StrategyError(
                    f"{name} keeps `{key}` of a weight of shape [{rows}, 4] in the shape {list(shape)}, and which "
                    "rank would have what of it is not known",
                    hints=hints,
                )
        moved = (whole[0] - values[0]).abs().max()
        mine = [part_of(_sharded(weight, mesh)).tensor for weight in whole]
        if any((part_of(s).tensor - m).abs().max() > 1e-3 * moved for s, m in zip(shards, mine, strict=True)):
            raise StrategyError(f"{name} updates a sharded weight otherwise than a whole one", hints=hints)


def _sharded(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """A weight that every rank holds, as FSDP lays it over the ranks."""
    rows = len(whole) // mesh.size(-1)
    mine = whole[mesh.get_local_rank(mesh.ndim - 1) * rows :][:rows].clone()
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    return DTensor.from_local(mine, mesh, placements, run_check=False)
