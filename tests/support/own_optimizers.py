"""Optimizers that remember more than each parameter's state; recipes in tests name them `./own_optimizers.py:Name`."""

from typing import Any

import torch
from torch.optim import Optimizer


class Counting(Optimizer):
    """Gradient descent whose rate depends on counters of every kind."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})
        self.count = 0
        self.factor = torch.tensor(1.0)
        self.seen: dict[str, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.factor *= 0.9
        self.seen["steps"] = self.seen.get("steps", 0) + 1
        self.state["global"]["k"] = self.state["global"].get("k", 0) + 2
        rate = float(self.factor) / (self.count + self.seen["steps"] + self.state["global"]["k"])
        for group in self.param_groups:
            group["d"] *= 0.95
            for weight in group["params"]:
                if weight.grad is not None:
                    weight.add_(weight.grad, alpha=-group["lr"] * group["d"] * rate)


class Remembering(Counting):
    """Keeps a list of its rates, which a checkpoint cannot hold."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.rates: list[float] = []

    def step(self, closure: Any = None) -> None:
        super().step()
        self.rates.append(self.count / 2)


class Noisy(Optimizer):
    """Draws from a generator of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                weight.add_(torch.randn(weight.shape, generator=self.generator), alpha=1e-3)


class Common(Optimizer):
    """One step size for all weights, from the norm of all of them, as in Prodigy and D-Adaptation."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["d"] = 1e-2 * float(sum(weight.square().sum() for weight in group["params"]))
            for weight in group["params"]:
                weight.add_(weight.grad, alpha=-group["lr"] * group["d"])
