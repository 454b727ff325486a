"""Custom strategy for tensor parallelism: all ranks train on the same samples and split the named layers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from ddpforge.interfaces import Box, CanonicalState, Contract, Replica, ShardedWeights, Strategy, TensorShard, World
from ddpforge.strategies import SingleRank, TorchReplica, named_state


class TensorParallel(Strategy):
    """Splits linear layers: `columns` by columns, `rows` by rows. The model must have no other parameters."""

    contract = Contract(
        shards=("weights", "gradients", "optimizer state"),
        clipping="identical on every rank, by the norm over all shards",
        accumulation="the shards' .grad",
    )
    needs_process_group = True

    def __init__(self, *, columns: Sequence[str], rows: Sequence[str]) -> None:
        self.plan = {**dict.fromkeys(columns, ColwiseParallel()), **dict.fromkeys(rows, RowwiseParallel())}

    def data_ranks(self, ranks: int) -> int:
        return 1

    def setup(self, train: Any, world: World) -> World:
        self.mesh = init_device_mesh(world.device.type, (world.global_ranks.size,))
        return super().setup(train, replace(world, dp_ranks=SingleRank(world.device)))

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        return parallelize_module(super().wrap(model, blocks), self.mesh, self.plan)

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        return Cut(self, model, optimizer, ShardedWeights(model, part))


class Cut(TorchReplica):
    def norm(self, gradients: list[Any]) -> Tensor:
        return torch.stack([gradient.norm().full_tensor() for gradient in gradients]).norm()

    def clip(self, largest: float, norm: Tensor) -> None:
        shards: list[Any] = [parameter.grad for parameter in self.gradients.trained]
        torch._foreach_mul_([shard.to_local() for shard in shards], (largest / (norm + 1e-6)).clamp(max=1.0))

    def state(self) -> CanonicalState[Any]:
        state = named_state.capture(self.unwrapped, self.optimizer)
        moments = {name: parts(entry) for name, entry in state.optimizer.items()}
        return replace(state, model=parts(state.model), optimizer=moments, extra_state=self.remembered())

    def load_state(self, state: CanonicalState[Any], *, partial: bool = False) -> None:
        named_state.restore(self.unwrapped, self.optimizer, state, partial=partial, part_of=part, like=like)
        self.remember(state)


def parts(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: part(name, value) if isinstance(value, DTensor) else value for name, value in values.items()}


def part(name: str, tensor: Any) -> TensorShard:
    """Returns the shard of this rank: a box, or the whole tensor if it is replicated."""
    mesh, local = tensor.device_mesh, tensor.to_local().detach()
    (placement,) = tensor.placements
    if placement.is_replicate():
        return TensorShard.whole(local, replica=mesh.get_local_rank(), replicas=mesh.size())
    offset = [0] * tensor.ndim
    offset[placement.dim] = mesh.get_local_rank() * local.shape[placement.dim]
    return TensorShard(local, tuple(tensor.shape), Box(tuple(offset), tuple(local.shape)))


def like(mine: Tensor, parameter: Any) -> DTensor:
    return DTensor.from_local(mine, parameter.device_mesh, parameter.placements, run_check=False)
