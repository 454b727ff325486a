"""Copies of weights in lower precision, which autocast makes, are made again in the backward pass instead of kept.

Where weights are sharded, keeping the copies would be keeping the whole model on every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["remade"]

_VIEWS = {"TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "UnsqueezeBackward0"}


class _Cast(NamedTuple):
    """A tensor that was made from a weight: its dtype, and its place in the weight."""

    weight: nn.Parameter
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def remade() -> torch.autograd.graph.saved_tensors_hooks:
    """Inside of it, autograd saves of a weight in another dtype only where it came from.

    The weight itself must be there, with the same values, when the backward pass comes to what it was used in.
    """
    return torch.autograd.graph.saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> Tensor | _Cast:
    made_by: Any = tensor.grad_fn
    if made_by is None or tensor.dtype.itemsize != 2:
        return tensor
    while made_by is not None and made_by.name() in _VIEWS:
        made_by = made_by.next_functions[0][0]
    if made_by is None or made_by.name() != "ToCopyBackward0":
        return tensor
    weight = getattr(made_by.next_functions[0][0], "variable", None)  # what accumulates a gradient has one
    if not isinstance(weight, nn.Parameter) or tensor.untyped_storage().nbytes() != weight.numel() * tensor.itemsize:
        return tensor
    return _Cast(weight, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))


def _unpack(saved: Tensor | _Cast) -> Tensor:
    if isinstance(saved, Tensor):
        return saved
    return saved.weight.detach().to(saved.dtype).as_strided(saved.size, saved.stride, saved.offset)
