"""Memory layout of weights: without gaps, and channels last for convolutions if the recipe sets it."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpforge.errors import StrategyError
from ddpforge.training.features import Assembled, Feature
from ddpforge.training.stages import Built

__all__ = ["ChannelsLast", "check_channels_last", "extent", "is_dense", "make_dense", "put_channels_last", "repeats"]

log = logging.getLogger("ddpforge")


def make_dense(model: nn.Module) -> None:
    """Closes the gaps in the memory of parameters, and gives buffers made with `expand` memory for each element.

    Call it after the checks of `guard.model`, which refuse tensors that share memory.
    """
    # torch's fused optimizers treat a parameter as contiguous, and would update its gaps. Ranks cannot receive values
    # into a buffer whose elements share memory.
    gaps = [(name, parameter) for name, parameter in model.named_parameters() if not is_dense(parameter)]
    repeated = [(name, buffer) for name, buffer in model.named_buffers() if repeats(buffer)]
    for _, tensor in (*gaps, *repeated):
        tensor.data = tensor.data.contiguous()
    for kind, found, why in (
        ("parameter", gaps, "had gaps in memory (slices of a larger tensor)"),
        ("buffer", repeated, "repeated numbers in memory (`expand`)"),
    ):
        if found:
            names = ", ".join(f"`{name}`" for name, _ in found)
            log.info("%s%s %s %s: made dense", kind, "s" * (len(found) > 1), names, why)


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


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor's elements fill the memory that it spans, in any order, each place once."""
    start, stop = extent(tensor)
    return not tensor.numel() or (stop - start == tensor.nbytes and not repeats(tensor))


def repeats(tensor: Tensor) -> bool:
    """True if several elements of a tensor share a place in memory."""
    axes = sorted((step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    reach = 0
    for step, size in axes:
        if step <= reach:
            break
        reach += step * (size - 1)
    else:
        return False
    if not tensor.numel():
        return False
    places = torch.arange(1 + sum(step * (size - 1) for step, size in axes))
    found: Tensor = torch.unique(places.as_strided(tensor.shape, tensor.stride()))
    return found.numel() < tensor.numel()


def extent(tensor: Tensor) -> tuple[int, int]:
    """Returns the bytes of its storage that a tensor spans: the first, and the one after the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize
