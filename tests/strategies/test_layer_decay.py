"""Layer-wise learning rate decay: the same update under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.forked import Training, in_ranks
from torch import Tensor, nn

from ddpforge.components.registry import Registry
from ddpforge.interfaces import Strategy
from ddpforge.recipe.schema import OptimizerComponent
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.deepspeed import DeepSpeed
from ddpforge.strategies.fsdp import FSDP
from ddpforge.training.optimizers import build_optimizer

pytestmark = pytest.mark.usefixtures("deepspeed")
RECIPE = OptimizerComponent(use="sgd", options={"lr": 0.8}, layer_decay=0.5)
RATES = {"before.weight": 0.1, "blocks.0.inner.weight": 0.2, "blocks.1.inner.weight": 0.4, "behind.weight": 0.8}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


class Sums(nn.Module):
    """Model in which the gradient of every weight is the input: the change of a weight shows its rate."""

    def __init__(self) -> None:
        super().__init__()
        self.before = Scale()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.behind = Scale()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x) for part in (self.before, *self.blocks, self.behind)]).sum(0)


def trained(build: Callable[[], Strategy]) -> Callable[[int], Any]:
    held: list[nn.Module] = []

    def blocks(model: Any) -> list[nn.Module]:
        held.append(model)
        return list(model.blocks)

    def action(rank: int) -> Any:
        optimizer = lambda _: build_optimizer(Registry.installed(), RECIPE, held[0], ())  # noqa: E731
        training = Training(build(), Sums, optimizer, blocks)
        for _ in range(2):
            training.step(torch.ones(4))
        found = {}
        for name, part in training.replica.weights.shards().items():
            mine = torch.zeros(part.shape).flatten()
            mine[part.region.start : part.region.stop] = part.tensor.flatten()
            found[name] = (training.world.global_ranks.all_reduce_sum(mine) / part.replicas).tolist()
        return found

    return action


@pytest.mark.parametrize(
    "build",
    [DDP, FSDP, lambda: DeepSpeed(stage=1), lambda: DeepSpeed(stage=3)],
    ids=["ddp", "fsdp", "zero1", "zero3"],
)
def test_each_layer_has_its_own_learning_rate(build: Callable[[], Strategy]) -> None:
    for found in in_ranks(2, trained(build)):
        assert found.keys() == RATES.keys()
        for name, rate in RATES.items():
            assert found[name] == pytest.approx([-2 * rate] * 4)
