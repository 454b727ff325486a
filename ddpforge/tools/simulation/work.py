"""Counts what operations compute, what they move in memory, and what they send to other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ddpforge.training.ledger import EMPTY, tensors_in

__all__ = ["Operation", "Sent", "Work"]

_ATEN = torch.ops.aten
_NAMES = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "send", "recv")
_SHORT = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "p2p": "send"}


class Operation(NamedTuple):
    """One kind of operation: its floating-point operations, bytes it reads and writes, and its dtype."""

    flops: int
    moved: int
    dtype: torch.dtype


class Sent(NamedTuple):
    """A collective over so many ranks, and the bytes of its whole tensor."""

    name: str
    ranks: int
    bytes: int

    @property
    def wire(self) -> float:
        """Bytes that a rank sends, by the ring algorithms of NCCL and gloo (Patarasuk and Yuan, 2009)."""
        share = (self.ranks - 1) / self.ranks
        return self.bytes * {"all_reduce": 2 * share, "send": 1.0, "broadcast": 1.0, "recv": 0.0}.get(self.name, share)


class Work:
    """The work of a step: how often each kind of operation is done, and each collective."""

    def __init__(self) -> None:
        self.operations: Counter[Operation] = Counter()
        self.sent: Counter[Sent] = Counter()

    def __add__(self, other: Work) -> Work:
        return _of(self.operations + other.operations, self.sent + other.sent)

    def __sub__(self, other: Work) -> Work:
        return _of(self.operations - other.operations, self.sent - other.sent)

    def __mul__(self, times: float) -> Work:
        return _of(
            Counter({one: round(count * times) for one, count in self.operations.items()}),
            Counter({one: round(count * times) for one, count in self.sent.items()}),
        )

    def copy(self) -> Work:
        """The work so far."""
        return _of(self.operations.copy(), self.sent.copy())

    @property
    def flops(self) -> int:
        """Floating-point operations of matrix products, convolutions and attention; a multiply-add is two."""
        return sum(one.flops * count for one, count in self.operations.items())

    def wire(self) -> dict[str, float]:
        """Bytes that this rank sends, by collective and number of ranks: "all_gather over 8"."""
        found: Counter[str] = Counter()
        for one, count in self.sent.items():
            found[f"{one.name} over {one.ranks}"] += one.wire * count  # type: ignore[assignment]
        return dict(found)

    def add(self, func: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> None:
        """Counts one operation on the tensors of a rank."""
        if func in collective_ops:
            self._send(func, args, kwargs, found)
        elif not func.is_view and func not in EMPTY and func.namespace != "prim":
            tensors = list(tensors_in((args, kwargs, found)))
            if tensors:
                moved = sum({id(one): one.numel() * one.element_size() for one in tensors}.values())
                dtype = next((one.dtype for one in tensors if one.is_floating_point()), tensors[0].dtype)
                self.operations[Operation(_flops(func, args, kwargs, found), moved, dtype)] += 1

    def _send(self, func: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> None:
        if func in sync_ops:
            return
        word = func._opname.strip("_")
        for short, name in _SHORT.items():
            word = word.replace(short, name)
        name = next((name for name in _NAMES if name in word), word)
        ranks = CollectiveOp.get_process_group(func, args).size()
        self.sent[Sent(name, ranks, CollectiveOp.get_comm_tensor_size(func, found, args, kwargs))] += 1


def _of(operations: Counter[Operation], sent: Counter[Sent]) -> Work:
    work = Work()
    work.operations, work.sent = operations, sent
    return work


def _flops(func: Any, args: Any, kwargs: Mapping[str, Any], found: Any) -> int:
    packet = func._overloadpacket
    if packet is _ATEN._scaled_dot_product_flash_attention_for_cpu:
        return int(sdpa_flop_count(*(one.shape for one in args[:3])))  # type: ignore[no-untyped-call]
    if packet is _ATEN._scaled_dot_product_flash_attention_for_cpu_backward:
        return int(sdpa_backward_flop_count(*(one.shape for one in args[:4])))  # type: ignore[no-untyped-call]
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=found)) if formula else 0
