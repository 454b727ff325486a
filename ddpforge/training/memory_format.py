"""Lays weights out in memory: without gaps, and those of convolutions channels last where the recipe says so."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from ddpforge.errors import StrategyError

__all__ = ["check_channels_last", "extent", "is_dense", "make_dense", "put_channels_last", "repeats"]

log = logging.getLogger("ddpforge")


def make_dense(model: nn.Module) -> None:
    """Closes the gaps in the memory of parameters, and gives buffers made with `expand` memory for each element.

    torch's fused optimizers update as many numbers from a parameter's first on as it has, gaps included; ranks cannot
    receive values into a buffer that repeats some. Call after `preflight.model`: tensors share no memory.
    """
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


def is_dense(tensor: Tensor) -> bool:
    """True if a tensor's elements fill the memory that it spans, in whatever order."""
    start, stop = extent(tensor)
    return not tensor.numel() or (stop - start == tensor.nbytes and not repeats(tensor))


def repeats(tensor: Tensor) -> bool:
    """True if several elements of a tensor are one number in memory."""
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
    """The bytes of its storage that a tensor spans: the first, and the one after the last."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize
