"""Multi-pass optimizer, and a model for which its results can be computed by hand."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.interfaces import Replica
from ddpforge.strategies.single import Single


class Uphill(torch.optim.SGD):
    """Gradient descent with the gradient at a point that is `rho` further uphill per pass after the first."""

    def __init__(self, params: list[dict[str, Any]], lr: float = 0.1, rho: float = 0.5, passes: int = 2) -> None:
        super().__init__(params, lr=lr)
        self.rho, self.passes = rho, passes
        self.before: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def perturb(self, norm: float) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self.before.setdefault(weight, weight.clone())
                    weight.add_(weight.grad, alpha=self.rho / norm)

    @torch.no_grad()
    def restore(self) -> None:
        for weight, value in self.before.items():
            weight.copy_(value)
        self.before.clear()


class Bowl(nn.Module):
    """The loss of a sample x is half the square of the distance between weights and x; counts forward passes."""

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.0, 1.0, 3.0]))
        self.noise = noise
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        x = x.unsqueeze(1) + self.noise * torch.randn(len(x), 3)
        return 0.5 * (self.weight - x).square().sum(1)


class OnePass(Single):
    """Strategy that does not support multi-pass optimizers."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        return _OnePass(super().prepare(model, optimizer))


class _OnePass(Replica):
    def __init__(self, inner: Replica) -> None:
        self.module, self.unwrapped, self.weights, self.inner = inner.module, inner.unwrapped, inner.weights, inner

    def step(self) -> Tensor:
        return self.inner.step()

    def state(self) -> Any:
        return self.inner.state()

    def load_state(self, state: Any, *, partial: bool = False) -> None:
        self.inner.load_state(state, partial=partial)
