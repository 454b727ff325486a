"""Patches for DeepSpeed's ZeRO on fake tensors, for one rank among thousands."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["forget_groups", "one_of_many"]


def forget_groups() -> None:
    """Removes the simulated ranks from DeepSpeed's variables, which live as long as the process."""
    if (groups := sys.modules.get("deepspeed.utils.groups")) is None:
        return
    sys.modules["deepspeed.comm.comm"].cdb = None  # type: ignore[attr-defined]
    for name, value in vars(groups).items():
        if isinstance(value, dist.ProcessGroup):
            setattr(groups, name, None)
        elif name.startswith("_") and name.isupper() and isinstance(value, dict):
            value.clear()


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _ranks(count: int) -> range:
    """Replaces `range`, which the module uses only for loops over all ranks: this rank, and the ranks before it."""
    return range(min(count, dist.get_rank() + 1))


def _wait(handle: Any, handle_dependency: bool = True) -> None:
    """Replaces the end of an all-gather: assembles each weight from the slices of all ranks."""
    if handle.complete:
        return
    handle.allgather_handle.wait()
    for parameter in handle.params:
        gathered = handle.partitions[0].as_strided((parameter.ds_numel,), (1,))
        parameter.data = gathered.clone().view(parameter.ds_shape).to(parameter.ds_tensor.dtype)
        parameter.ds_status = type(parameter.ds_status).AVAILABLE
    handle.complete = True


@torch.no_grad()
def _reduce_scatter(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """Replaces a reduce-scatter: one padded buffer of all tensors; returns this rank's part of each tensor."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    lengths = [math.ceil(tensor.numel() / ranks) for tensor in tensors]
    padding = sum(lengths) * ranks - sum(tensor.numel() for tensor in tensors)
    if len(tensors) == 1 and not padding:
        buffer = tensors[0].view(-1)
    else:
        flat = [tensor.view(-1) for tensor in tensors]
        buffer = torch.cat([*flat, flat[0].new_empty(padding)])
    buffer.div_(ranks)
    own = buffer.narrow(0, rank * sum(lengths), sum(lengths))
    dist.reduce_scatter_tensor(own, buffer, group=group)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    held = [min(length, max(0, one.numel() - rank * length)) for one, length in zip(tensors, lengths, strict=True)]
    return [own.narrow(0, start, length) for start, length in zip(starts, held, strict=True)]


_STAND_INS: Sequence[tuple[str, str, Callable[..., Any]]] = (
    ("partitioned_param_coordinator", "assert_ints_same_as_other_ranks", _nothing),
    ("stage3", "reduce_scatter_coalesced", _reduce_scatter),
    ("partition_parameters", "range", _ranks),
    ("partition_parameters", "AllGatherCoalescedHandle.wait", _wait),
)
"""Module of deepspeed.runtime.zero, name in it, and replacement."""


@contextmanager
def one_of_many() -> Iterator[None]:
    """Makes ZeRO, if it is in use, compute only this rank's part of a tensor, without checks of other ranks."""
    # DeepSpeed cuts every weight and gradient for every rank, one slice after another, and uses one of them.
    with ExitStack() as stack:
        for module, name, stand_in in _STAND_INS:
            user: Any = sys.modules.get(f"deepspeed.runtime.zero.{module}")
            *owner, name = name.split(".")
            if user:
                user = getattr(user, *owner) if owner else user
                stack.enter_context(patch.object(user, name, stand_in, create=name == "range"))
        yield
