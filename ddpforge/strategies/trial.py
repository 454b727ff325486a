"""Tries an optimizer out on a small weight, to find out what it would do before it does it to a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.strategies.own_state import OwnState

__all__ = ["refuse_closure", "refuse_sparse", "tried"]


def tried(
    optimizer: Optimizer, group: Mapping[str, Any], *values: Sequence[Tensor]
) -> tuple[list[Tensor], dict[str, Any]]:
    """Steps a double of `optimizer`, with the options of `group`, on one weight for each of `values`.

    Each begins with its first value and gets the others as gradients. Returns the weights, and the state that the
    double keeps of the first. The optimizer's own counters stay as they are.
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
    finally:
        own.reset()  # what the double shares with the optimizer
    return [weight.detach() for weight in weights], double.state[weights[0]]


def refuse_closure(optimizer: Optimizer) -> None:
    """Raises StrategyError for an optimizer that wants to compute gradients itself, as LBFGS does."""
    closure = next(iter(signature(optimizer.step).parameters.values()), None)
    if closure is not None and closure.default is Parameter.empty and closure.kind is Parameter.POSITIONAL_OR_KEYWORD:
        raise StrategyError(
            f"{type(optimizer).__name__} needs a closure that computes the loss anew, and a step computes it once",
            hints=[
                "use another optimizer; one that implements `ddpforge.interfaces.Exploring` may make several passes"
            ],
        )


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
        group = next(g for g in optimizer.param_groups if any(p is module.weight for p in g["params"]))
        gradient = torch.sparse_coo_tensor(
            torch.tensor([[0, 2]]), torch.ones(2, 3), (4, 3), device=module.weight.device, check_invariants=True
        )
        try:
            _, state = tried(optimizer, group, [torch.zeros(4, 3, device=gradient.device), gradient, gradient])
            kept = [key for key, value in state.items() if isinstance(value, Tensor) and value.is_sparse]
            reason = f"keeps its `{kept[0]}` sparse, which no checkpoint can hold" if kept else None
        except RuntimeError as error:
            reason = f"does not take them: {error}"
        if reason:
            raise StrategyError(
                f"`{name}` ({type(module).__name__}) gives sparse gradients, and {type(optimizer).__name__} {reason}",
                hints=[
                    "leave out `sparse = True` of the embedding",
                    'or set optimizer.use = "sgd" with fused = false and without momentum',
                ],
            )
    if isinstance(optimizer, torch.optim.SparseAdam):
        _refuse_dense(model, {id(module.weight) for module in embeddings.values()})


def _is_sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad


def _refuse_dense(model: nn.Module, sparse: set[int]) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sparse:
            raise StrategyError(
                f"SparseAdam takes sparse gradients only, and that of `{name}` is dense",
                hints=['set optimizer.use = "adamw"'],
            )
