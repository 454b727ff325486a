"""Tries an optimizer out on a small weight, to find out what it would do before it does it to a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddpforge.strategies.own_state import OwnState

__all__ = ["tried"]


def tried(optimizer: Optimizer, group: Mapping[str, Any], values: Sequence[Tensor]) -> tuple[Tensor, dict[str, Any]]:
    """Steps a double of `optimizer` from the first of `values`, with the others as gradients; `group` has its options.

    Returns the weight and the state that the double keeps of it. The optimizer's own counters stay as they are.
    """
    start, *gradients = values
    weight = start.clone().requires_grad_()
    own = OwnState(optimizer)
    double: Optimizer = object.__new__(type(optimizer))
    double.__dict__ = vars(optimizer) | {
        "state": defaultdict(dict),
        "param_groups": [{**group, "params": [weight], "lr": 0.1}],
    }
    try:
        for gradient in gradients:
            weight.grad = gradient.clone()
            double.step()
    finally:
        own.reset()  # what the double shares with the optimizer
    return weight.detach(), double.state[weight]
