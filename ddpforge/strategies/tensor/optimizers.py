"""An optimizer tried on shares of a weight, before it gets those of a model."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.strategies.trial import tried

__all__ = ["try_on_shares"]

_HINTS = ("set strategy.tensor = 1", "or use AdamW, SGD or another element-wise optimizer")


def try_on_shares(optimizer: Optimizer, device: torch.device) -> None:
    """Raises StrategyError for an optimizer that does not do with rows or columns what it does with a whole weight."""
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        generator = torch.Generator().manual_seed(0)
        values = [torch.randn(4, 4, generator=generator).to(device) for _ in range(4)]
        whole, state = tried(optimizer, group, values, values[::-1])
        for key, value in state.items():
            if (shape := tuple(getattr(value, "shape", ()))) not in ((), (4, 4)):
                raise StrategyError(
                    f"{name} keeps `{key}` of a weight of shape [4, 4] in the shape {list(shape)}, and which rank "
                    "would have what of it is not known",
                    hints=_HINTS,
                )
        moved = (whole[0] - values[0]).abs().max()
        for dim in (0, 1):
            part = [value.narrow(dim, 0, 2) for value in values]
            shares, _ = tried(optimizer, group, part, part[::-1])
            if any((s - w.narrow(dim, 0, 2)).abs().max() > 1e-3 * moved for s, w in zip(shares, whole, strict=True)):
                raise StrategyError(f"{name} updates a share of a weight otherwise than the whole", hints=_HINTS)
