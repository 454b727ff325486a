"""Proves, before the first step, that a strategy does what its contract says."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import Contract, Strategy, Weights, World

__all__ = ["Size", "contract_of", "count_parameters", "prove"]


@dataclass(frozen=True)
class Size:
    """Elements of a model's parameters, tied ones counted once."""

    all: int
    trainable: int


def count_parameters(model: nn.Module) -> Size:
    """The size of a bare model."""
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return Size(sum(n for n, _ in sizes), sum(n for n, trains in sizes if trains))


def contract_of(strategy: Strategy) -> Contract:
    """What the strategy promises; raises PluginError when it promises nothing."""
    if not isinstance(contract := getattr(strategy, "contract", None), Contract):
        raise PluginError(
            f"{type(strategy).__name__} has no contract",
            hints=["set `contract = Contract(…)` on the class or in __init__"],
        )
    return contract


def prove(strategy: Strategy, world: World, weights: Weights, size: Size) -> None:
    """Raises StrategyError unless the weights are of the promised dtype, spread over the ranks as promised, and sums
    are over data ranks.

    Every rank counts the elements that its optimizer updates. Together they are the model once for every copy that
    the contract names: a strategy that was to shard and did not, or the other way round, is found here.
    """
    name, contract = type(strategy).__name__, contract_of(strategy)
    parts = weights.parts()
    for parameter, part in parts.items():
        dtype = str(part.tensor.dtype).removeprefix("torch.")
        if dtype not in (contract.master_dtype, "float64"):
            raise StrategyError(
                f"parameter `{parameter}` is {dtype}, and {name} promises {contract.master_dtype} master weights: "
                "updates smaller than a rounding step would vanish",
                hints=['build the model in float32; train.precision = "bf16" computes in bfloat16 all the same'],
            )

    counted = strategy.total(torch.ones((), dtype=torch.float64)).item()
    if counted != world.data_size:
        raise StrategyError(
            f"{name}.total adds up {counted:g} ones over {world.data_size} data ranks: gradients, which are divided by "
            "such a sum, would be of another size",
            hints=["this is a bug in the strategy: it must sum over ranks that see different data, each counted once"],
        )

    copies = contract.copies if "optimizer state" in contract.shards else world.size
    mine = torch.tensor(sum(part.region.numel for part in parts.values()), device=world.device)
    if world.size > 1:
        dist.all_reduce(mine)  # over all ranks, also those that see the same data
    held = int(mine)
    if held != copies * size.trainable:
        raise StrategyError(
            f"{name} promises {copies} {'copy' if copies == 1 else 'copies'} of the {size.trainable:,} trainable "
            f"weights among {world.size} ranks, and they hold {held:,} together",
            hints=["this is a bug in the strategy: what it promises is not what runs"],
        )
