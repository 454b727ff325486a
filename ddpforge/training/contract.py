"""Checks before the first step that a strategy keeps its contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import Contract, Strategy, Weights, World

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["SMALL", "ParameterCount", "contract_of", "count_parameters", "verify_contract"]

SMALL = 50_000_000  # parameters up to which a model is copied and evaluated in a moment


@dataclass(frozen=True)
class ParameterCount:
    """Number of elements in a model's parameters; tied parameters count once.

    `frozen` has the number of frozen elements by dtype, e.g. "bf16", and `frozen_bytes` their size.
    """

    all: int
    trainable: int
    frozen: Mapping[str, int] = field(default_factory=dict)
    frozen_bytes: int = 0


def count_parameters(model: nn.Module) -> ParameterCount:
    """Counts the parameters of a bare model, without those of lazy modules.

    A module that packs a frozen weight into other tensors has the attribute `packs`, a mapping from the name of the
    format to the number of elements of the weight. These count, and its parameters that are not floats do not.
    """
    from torch.nn.parameter import is_lazy

    trained = sum(one.numel() for one in model.parameters() if one.requires_grad and not is_lazy(one))
    frozen: Counter[str] = Counter()
    size = 0
    seen: set[int] = set()
    for module in model.modules():
        packs = getattr(module, "packs", None) or {}
        frozen.update(packs)
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad or is_lazy(parameter) or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            size += parameter.numel() * parameter.element_size()
            if not packs or id(parameter) == id(getattr(module, "bias", None)):
                frozen[_short(parameter)] += parameter.numel()
    return ParameterCount(trained + sum(frozen.values()), trained, dict(frozen), size)


def _short(tensor: Tensor) -> str:
    """Returns the dtype as recipes spell it, e.g. "bf16"."""
    name = str(tensor.dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def contract_of(strategy: Strategy) -> Contract:
    """Returns the strategy's contract; raises PluginError if it has none."""
    if not isinstance(contract := getattr(strategy, "contract", None), Contract):
        raise PluginError(
            f"{type(strategy).__name__} has no contract",
            hints=["set `contract = Contract(…)` on the class or in __init__"],
        )
    return contract


def verify_contract(contract: Contract, name: str, world: World, weights: Weights, size: ParameterCount) -> None:
    """Raises StrategyError unless the weights have the dtype and the sharding that `contract` promises. Collective.

    Every rank counts the elements that its optimizer updates, each divided by its number of copies. The sum over ranks
    must be the size of the model. If the strategy shards, an element exists once in each replica; if not, every rank
    has all elements.
    """
    import torch

    parts = weights.shards()
    for parameter, part in parts.items():
        dtype = str(part.tensor.dtype).removeprefix("torch.")
        if dtype not in (contract.master_dtype, "float64"):
            raise StrategyError(
                f"parameter `{parameter}` is {dtype}, but {name} promises {contract.master_dtype} master weights: "
                "updates smaller than a rounding step would be lost",
                hints=['build the model in float32; train.precision = "bf16" still computes in bfloat16'],
            )

    counted = world.dp_ranks.all_reduce_sum(torch.ones((), dtype=torch.float64)).item()
    if counted != world.dp_ranks.size:
        raise StrategyError(
            f"{name} declares {world.dp_ranks.size} data-parallel rank(s), but a sum over them counts {counted:g}: "
            "gradients would be divided by the wrong number",
            hints=["this is a bug in the strategy: `World.dp_ranks` must have each data-parallel rank once"],
        )

    splits = "optimizer state" in contract.shards
    replicas = contract.replicas if splits else world.global_ranks.size
    # Even if the strategy shards, several ranks may hold the same part: tensor-parallel ranks replicate some weights.
    found = sorted(set().union(*world.global_ranks.all_gather_object({part.replicas for part in parts.values()})))
    kept = not found or (found[0] if splits else found) == (replicas if splits else [replicas])
    once = sum(part.region.numel / part.replicas for part in parts.values())
    model = world.global_ranks.all_reduce_sum(torch.tensor(once, dtype=torch.float64)).item()
    if round(model) != size.trainable or not kept:
        held = f"{round(model):,} of {size.trainable:,} trainable weights"
        times = "" if kept else f", each part {found[0]} times"
        raise StrategyError(
            f"{name} promises that {world.global_ranks.size} ranks hold each trainable weight "
            f"{'once' if replicas == 1 else f'{replicas} times'}, but they hold {held}{times}",
            hints=["this is a bug in the strategy: its sharding does not match its contract"],
        )
