"""L-BFGS without a line search."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["LBFGS"]

_CURVATURE = 1e-10  # least product of a step and its change of the gradient, as in torch.optim.LBFGS
_SLOPE = -1e-9  # the loss must fall at least this steeply along the direction


class LBFGS(Optimizer):
    """One iteration of `torch.optim.LBFGS` per step, with tensors per weight as state. The device is never waited for.

    The state of a weight: its last gradient, its last step, and the last `history_size` steps and changes of the
    gradient, each [history_size, *shape]; unused places are zero.
    """

    def __init__(self, params: list[dict[str, Any]], lr: float = 1.0, history_size: int = 10) -> None:
        super().__init__(params, {"lr": lr})
        self.history_size = history_size

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves all weights that have a gradient; see Nocedal and Wright, "Numerical Optimization", algorithm 7.4."""
        weights = [(p, group["lr"]) for group in self.param_groups for p in group["params"] if p.grad is not None]
        if not weights:
            return
        gradients = [p.grad.clone() for p, _ in weights]
        first = not any(self.state[p] for p, _ in weights)
        kept = [self._state(p) for p, _ in weights]

        changes = [g - state["gradient"] for g, state in zip(gradients, kept, strict=True)]
        accepted = _dot(changes, [state["step"] for state in kept]) > _CURVATURE
        for state, gradient, change in zip(kept, gradients, changes, strict=True):
            for key, newest in (("steps", state["step"]), ("changes", change)):
                state[key] = torch.where(accepted, torch.cat([state[key][1:], newest[None]]), state[key])
            state["gradient"] = gradient

        direction = self._direction(gradients, kept)
        slope = _dot(gradients, direction)
        size = torch.where(slope > _SLOPE, 0.0, torch.ones_like(slope))  # no descent: the weights stay
        if first:
            size = size * (1 / torch.stack([g.abs().sum() for g in gradients]).sum()).clamp(max=1.0)
        for (weight, lr), state, d in zip(weights, kept, direction, strict=True):
            state["step"] = d * (size * lr).to(d.dtype)
            weight.add_(state["step"])

    def _state(self, weight: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        if not state:
            state["gradient"], state["step"] = torch.zeros_like(weight), torch.zeros_like(weight)
            for key in ("steps", "changes"):
                state[key] = weight.new_zeros(self.history_size, *weight.shape)
        return state

    def _direction(self, gradients: Sequence[Tensor], kept: Sequence[dict[str, Any]]) -> list[Tensor]:
        """Returns minus the gradient times the estimate of the inverse Hessian, one tensor per weight."""
        pairs = [
            ([state["steps"][i] for state in kept], [state["changes"][i] for state in kept])
            for i in range(self.history_size)
        ]
        products = [_dot(step, change) for step, change in pairs]
        inverse = [torch.where(product > 0, 1 / product, 0.0) for product in products]  # an empty place has no effect
        found = [-g for g in gradients]
        factors = []
        for (step, change), rho in zip(pairs[::-1], inverse[::-1], strict=True):
            factors.append(_dot(step, found) * rho)
            found = [d - factors[-1] * y for d, y in zip(found, change, strict=True)]
        newest = _dot(pairs[-1][1], pairs[-1][1])
        found = [d * torch.where(newest > 0, products[-1] / newest, 1.0) for d in found]
        for (step, change), rho, factor in zip(pairs, inverse, factors[::-1], strict=True):
            rest = factor - _dot(change, found) * rho
            found = [d + rest * s for d, s in zip(found, step, strict=True)]
        return found


def _dot(one: Sequence[Tensor], other: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the products of all elements, as a tensor of no dimensions on the first weight's device."""
    return torch.stack([(a * b).sum() for a, b in zip(one, other, strict=True)]).sum()
