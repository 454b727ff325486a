"""Channels-last format of convolutions, which their kernels prefer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpforge.errors import StrategyError
from ddpforge.training.features import Assembled, Feature
from ddpforge.training.stages import Built

__all__ = ["ChannelsLast", "check_channels_last", "put_channels_last"]


class ChannelsLast(Feature):
    """Weights of convolutions in channels-last format."""

    @staticmethod
    @override
    def rework(parts: Built, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        if parts.recipe.train.channels_last:
            put_channels_last(model)
        return model

    @classmethod
    def of(cls, run: Assembled) -> None:
        """Raises StrategyError if the strategy has changed the layout; a step needs nothing else."""
        recipe = run.parts.recipe
        if recipe.train.channels_last:
            check_channels_last(run.replica.unwrapped, recipe.strategy.use)


def put_channels_last(model: nn.Module) -> None:
    """Puts the weights of 2-D convolutions in channels-last format; activations follow. Raises ValueError without any.

    See https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html.
    """
    if not _weights(model):
        raise ValueError("train.channels_last applies to 2-D convolutions, and the model has none: remove it")
    model.to(memory_format=torch.channels_last)


def check_channels_last(model: nn.Module, strategy: str) -> None:
    """Raises StrategyError if the strategy has changed the layout of the weights."""
    for name, weight in _weights(model).items():
        if weight.is_meta:
            continue  # belongs to another stage
        if not weight.is_contiguous(memory_format=torch.channels_last):
            raise StrategyError(
                f'train.channels_last has no effect under strategy.use = "{strategy}", which stores `{name}` in its '
                "own layout",
                hints=["remove train.channels_last", 'or set strategy.use = "ddp" or "single"'],
            )


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Returns the weights of 2-D convolutions by name."""
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    return {f"{name}.weight": module.weight for name, module in model.named_modules() if isinstance(module, kinds)}
