"""The units that FSDP gathers at a time: a block, or the rest of a model; and models of which it can make none."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ddpforge import compat
from ddpforge.errors import StrategyError

__all__ = ["check_sharded", "policy", "reduced", "refuse_form", "refuse_ties", "ties"]

_INTEGERS = "2.12"


def refuse_form(name: str, parameter: nn.Parameter) -> None:
    """Raises StrategyError for a parameter that cannot be sharded."""
    if not parameter.ndim:
        raise StrategyError(
            f"parameter `{name}` is a scalar, and FSDP shards along the first dimension",
            hints=["give it the shape [1]"],
        )
    if not parameter.numel() and parameter.requires_grad:
        raise StrategyError(
            f"parameter `{name}` has no elements, and FSDP cannot shard it",
            hints=["remove it from the model, or set requires_grad = False"],
        )
    if not (parameter.is_floating_point() or parameter.is_complex()) and not compat.torch_has(_INTEGERS):
        raise StrategyError(
            f"parameter `{name}` holds integers, which torch {torch.__version__} cannot shard",
            hints=[f"pip install 'torch>={_INTEGERS}'", "or make it a buffer"],
        )
    if compat.has_gradient_hooks(parameter):
        raise StrategyError(
            f"parameter `{name}` has a gradient hook, and under FSDP another tensor takes its place, without hooks",
            hints=['change gradients in the optimizer or by a module hook, or set strategy.use = "ddp"'],
        )


def reduced(unit: nn.Module) -> torch.dtype:
    """The dtype in which the gradients of what is not sharded yet are reduced: fp32, or the weights' own float64."""
    found: dict[torch.dtype, str] = {}
    for name, parameter in unit.named_parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            found.setdefault(parameter.dtype, name)
    if len(found) > 1:
        (one, first), (other, second) = [(str(d).removeprefix("torch."), name) for d, name in found.items()][:2]
        raise StrategyError(
            f"parameter `{first}` is {one} and `{second}` is {other}, and FSDP gathers both together",
            hints=["build the model in one dtype", "or name classes in train.blocks that hold only one"],
        )
    return torch.float64 if torch.float64 in found else torch.float32


def policy(gather: torch.dtype | None, reduce: torch.dtype) -> MixedPrecisionPolicy:
    """Weights are gathered in dtype `gather`, or as they are; gradients are reduced in dtype `reduce`.

    Inputs are left as they are: the residual stream has the dtype that autocast gives it under every strategy.
    """
    return MixedPrecisionPolicy(param_dtype=gather, reduce_dtype=reduce, cast_forward_inputs=False)


def ties(model: nn.Module) -> set[tuple[str, str]]:
    """Pairs of names of one parameter."""
    first: dict[int, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {(first[id(p)], name) for name, p in named if first.setdefault(id(p), name) != name}


def refuse_ties(before: set[tuple[str, str]], model: nn.Module) -> None:
    """Raises StrategyError where sharding has made two parameters of one that had several names `before`."""
    if broken := sorted(before - ties(model)):
        raise StrategyError(
            f"`{broken[0][0]}` and `{broken[0][1]}` are one parameter, and sharding them in different blocks would "
            "make them two",
            hints=["name other classes in train.blocks, so that both lie in one block or in none"],
        )


def check_sharded(model: nn.Module) -> None:
    """Every parameter must be a DTensor, sharded over its mesh's last dimension, with its part on this rank."""
    for name, parameter in model.named_parameters():
        if not isinstance(model, FSDPModule) or not isinstance(parameter, DTensor):
            raise StrategyError(f"asked for FSDP, but parameter `{name}` is a {type(parameter).__name__}")
        rows = -(-parameter.shape[0] // parameter.device_mesh.size(-1))
        if len(parameter.to_local()) > rows or not parameter.placements[-1].is_shard(0):
            raise StrategyError(f"asked for FSDP, but parameter `{name}` is placed as {parameter.placements}")
