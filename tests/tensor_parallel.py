"""Tensor parallelism as somebody else's strategy: all ranks see the same data and share out each layer."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from ddpforge.interfaces import Box, CanonicalState, Contract, Part, Replica, Strategy, Weights, World
from ddpforge.ranks.collectives import Alone
from ddpforge.strategies import TorchReplica


class Mlp(nn.Module):
    """Two layers: the first is cut by columns, the second by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class TensorParallel(Strategy):
    """Cuts the layers of `Mlp` over all ranks."""

    contract = Contract(
        shards=("weights", "gradients", "optimizer state"),
        clips="every rank alike, by the norm over all shards",
        accumulates="the shards' .grad",
    )
    joins_alone = True

    def data_ranks(self, ranks: int) -> int:
        return 1

    def setup(self, train: Any, world: World) -> World:
        self.mesh = init_device_mesh(world.device.type, (world.all.size,))
        return super().setup(train, replace(world, data=Alone(world.device)))

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        return parallelize_module(model, self.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        return Cut(self, model, optimizer, Shards(model))


class Shards(Weights):
    def __init__(self, model: nn.Module) -> None:
        self._parts = {name: part(parameter) for name, parameter in model.named_parameters()}

    def parts(self) -> dict[str, Part]:
        return self._parts

    def frozen(self) -> dict[str, Part]:
        return {}


def part(tensor: Any) -> Part:
    """What this rank holds: a box, or all of what is alike on every rank."""
    ranks, rank, local = tensor.device_mesh.size(), tensor.device_mesh.get_local_rank(), tensor.to_local().detach()
    (placement,) = tensor.placements
    if placement.is_replicate():
        return Part.whole(local, replica=rank, replicas=ranks)
    offset = [0] * tensor.ndim
    offset[placement.dim] = rank * local.shape[placement.dim]
    return Part(local, tuple(tensor.shape), Box(tuple(offset), tuple(local.shape)))


class Cut(TorchReplica):
    def norm(self, gradients: list[Tensor]) -> Tensor:
        square = torch.zeros(())
        for gradient in gradients:
            held: Any = gradient
            alike = self.world.all.size if isinstance(held.placements[0], Replicate) else 1
            square += held.to_local().square().sum() / alike
        return self.world.all.sum(square).sqrt()

    def clip(self, largest: float, norm: Tensor) -> None:
        for parameter in self.gradients.trained:
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.to_local().mul_((largest / (norm + 1e-6)).clamp(max=1.0))

    def state(self) -> CanonicalState[Any]:
        kept = {name: self.optimizer.state[p] for name, p in self.bare.named_parameters()}
        moments = {
            name: {key: part(x) if isinstance(x, DTensor) else x for key, x in entry.items()}
            for name, entry in kept.items()
        }
        return CanonicalState(self.weights.parts(), moments, shared=self.remembered())

    def load_state(self, state: CanonicalState[Any], *, partial: bool = False) -> None:
        for name, held in self.weights.parts().items():
            state.model[name].read_into(held.region, held.tensor)
        self.remember(state)
