"""Memory of parameters and buffers: without gaps, and with an element for each number."""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

__all__ = ["extent", "is_dense", "make_dense", "repeats"]

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
