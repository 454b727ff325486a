"""Lays out the weights of convolutions with channels last in memory, and sees that they stay so."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ddpforge.errors import StrategyError

__all__ = ["check_channels_last", "put_channels_last"]


def put_channels_last(model: nn.Module) -> None:
    """Lays out the weights of 2-D convolutions so, from which activations follow; raises ValueError without any.

    See https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html.
    """
    if not _weights(model):
        raise ValueError("train.channels_last is about 2-D convolutions, of which the model has none: leave it out")
    model.to(memory_format=torch.channels_last)


def check_channels_last(model: nn.Module, strategy: str) -> None:
    """Raises StrategyError where a strategy has laid weights out anew."""
    for name, weight in _weights(model).items():
        if weight.is_meta:
            continue  # of another stage
        if not weight.is_contiguous(memory_format=torch.channels_last):
            raise StrategyError(
                f'train.channels_last has no effect under strategy.use = "{strategy}", which lays `{name}` out in a '
                "form of its own",
                hints=["leave train.channels_last out", 'or set strategy.use = "ddp" or "single"'],
            )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights of convolutions that have a layout: 4 dimensions, more than one channel and position."""
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    return {f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, kinds)}
