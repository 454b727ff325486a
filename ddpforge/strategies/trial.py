"""Tries an optimizer out on a small weight, to find out what it would do before it does it to a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.strategies.own_state import OwnState
from ddpforge.strategies.several import members

__all__ = ["refuse_sparse", "tried"]


def tried(
    optimizer: Optimizer, group: Mapping[str, Any], *values: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Steps a double of `optimizer`, with the options of `group`, on one weight for each of `values`.

    Each begins with its first value and gets the others as gradients. Returns the weights, and the state that the
    double keeps of the first. The optimizer's own counters stay as they are. Raises StrategyError for an optimizer that
    needs what its constructor kept of each weight, and whatever it raises itself.
    """
    weights = [start.clone().requires_grad_() for start, *_ in values]
    own = OwnState(optimizer)
    double: Optimizer = object.__new__(type(optimizer))
    double.__dict__ = vars(optimizer) | {
        "state": defaultdict(dict),
        "param_groups": [{**group, "params": weights, "lr": 0.1}],
    }
    try:
        for gradients in list(zip(*values, strict=True))[1:]:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            double.step()
    except Exception as error:
        if not any(weight in optimizer.state for one in optimizer.param_groups for weight in one["params"]):
            raise
        raise StrategyError(
            f"{type(optimizer).__name__} needs what its constructor keeps of each weight, and weights are split later",
            hints=["let it make the state of a weight in `step`, where there is none", 'or set strategy.use = "ddp"'],
        ) from error
    finally:
        own.reset()  # what the double shares with the optimizer
    return [weight.detach() for weight in weights], double.state[weights[0]]


def refuse_sparse(optimizer: Optimizer, model: nn.Module, *, sharded: bool) -> None:
    """Raises StrategyError where embeddings give sparse gradients and the optimizer cannot take or save them.

    Where gradients are `sharded` nothing can take them.
    """
    embeddings = {name: module for name, module in model.named_modules() if _is_sparse(module)}
    for name, module in embeddings.items():
        if sharded:
            raise StrategyError(
                f"`{name}` ({type(module).__name__}) gives sparse gradients, and sharded ones are dense",
                hints=["leave out `sparse = True` of the embedding", 'or set strategy.use = "ddp"'],
            )
        assert isinstance(module.weight, nn.Parameter)
        owner, group = _owner(optimizer, module.weight)
        gradient = torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), device=module.weight.device, check_invariants=True
        )
        try:
            try:
                _, state = tried(owner, group, [torch.zeros(4, 3, device=gradient.device), gradient, gradient])
            except StrategyError:  # it steps with the state that it has
                state = owner.state[module.weight]
            kept = [key for key, value in state.items() if isinstance(value, Tensor) and value.is_sparse]
            reason = f"keeps its `{kept[0]}` sparse, which no checkpoint can hold" if kept else None
        except RuntimeError as error:
            reason = f"does not take them: {error}"
        if reason:
            raise StrategyError(
                f"`{name}` ({type(module).__name__}) gives sparse gradients, and {type(owner).__name__} {reason}",
                hints=[
                    "leave out `sparse = True` of the embedding",
                    'or set optimizer.use = "sgd" with fused = false and without momentum',
                ],
            )
    for _, member in members(optimizer):
        if isinstance(member, torch.optim.SparseAdam):
            _refuse_dense(member, model, {id(module.weight) for module in embeddings.values()})


def _owner(optimizer: Optimizer, weight: Tensor) -> tuple[Optimizer, dict[str, Any]]:
    """The optimizer that updates a weight, and the group in it."""
    groups = ((member, group) for _, member in members(optimizer) for group in member.param_groups)
    return next((member, group) for member, group in groups if any(p is weight for p in group["params"]))


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad


def _refuse_dense(optimizer: Optimizer, model: nn.Module, sparse: set[int]) -> None:
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for name, parameter in model.named_parameters():
        if id(parameter) in mine - sparse:
            raise StrategyError(
                f"SparseAdam takes sparse gradients only, and that of `{name}` is dense",
                hints=['set optimizer.use = "adamw"'],
            )
