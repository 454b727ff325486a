"""Proves, before the first step, that a strategy does what its contract says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import Contract, Strategy, Weights, World

if TYPE_CHECKING:
    from torch import nn

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
    """The strategy's contract; raises PluginError when it has none."""
    if not isinstance(contract := getattr(strategy, "contract", None), Contract):
        raise PluginError(
            f"{type(strategy).__name__} has no contract",
            hints=["set `contract = Contract(…)` on the class or in __init__"],
        )
    return contract


def prove(contract: Contract, name: str, world: World, weights: Weights, size: Size) -> None:
    """Raises StrategyError unless the weights are of the dtype that `contract` promises, and spread as it promises.

    Every rank counts the elements that its optimizer updates, each divided by how often it exists. Over all ranks they
    must be the model once. What is split exists once in each replica, what is not is whole on every rank.
    """
    import torch

    parts = weights.parts()
    for parameter, part in parts.items():
        dtype = str(part.tensor.dtype).removeprefix("torch.")
        if dtype not in (contract.master_dtype, "float64"):
            raise StrategyError(
                f"parameter `{parameter}` is {dtype}, and {name} promises {contract.master_dtype} master weights: "
                "updates smaller than a rounding step would vanish",
                hints=['build the model in float32; train.precision = "bf16" computes in bfloat16 all the same'],
            )

    counted = world.data.sum(torch.ones((), dtype=torch.float64)).item()
    if counted != world.data.size:
        raise StrategyError(
            f"{name} says that {world.data.size} ranks see different data, and their sum counts {counted:g} ones: "
            "gradients, which are divided by such a sum, would be of another size",
            hints=["this is a bug in the strategy: `World.data` must be the ranks that see different data, each once"],
        )

    splits = "optimizer state" in contract.shards
    replicas = contract.replicas if splits else world.all.size
    # Some of what is split may be on several ranks all the same: what tensor-parallel ranks hold alike, say.
    found = sorted(set().union(*world.all.everyone({part.replicas for part in parts.values()})))
    kept = not found or (found[0] if splits else found) == (replicas if splits else [replicas])
    once = sum(part.region.numel / part.replicas for part in parts.values())
    model = world.all.sum(torch.tensor(once, dtype=torch.float64)).item()
    if round(model) != size.trainable or not kept:
        held = f"{round(model):,} of {size.trainable:,} trainable weights"
        times = "" if kept else f", each part {found[0]} times"
        raise StrategyError(
            f"{name} promises that {world.all.size} ranks hold each trainable weight {_times(replicas)}, and they hold "
            f"{held}{times}",
            hints=["this is a bug in the strategy: what it promises is not what runs"],
        )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
