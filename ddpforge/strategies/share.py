"""Gives every rank the values that rank 0 has, whatever their dtype and layout."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["share"]


def share(tensor: Tensor) -> None:
    """Fills `tensor` with rank 0's values, in place; called on every rank.

    They travel as bytes: gloo knows neither int16 nor float8, NCCL neither int16 nor complex numbers.
    """
    if not tensor.numel():
        return
    held = tensor.detach().resolve_conj().resolve_neg().contiguous()
    dist.broadcast(held.view(-1).view(torch.uint8), src=0)
    if held.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(held)
