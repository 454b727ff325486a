"""Devices for plans, with the published memory and speeds, and the work of a training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ddpforge.features.memory_tracker import EMPTY, tensors_in
from ddpforge.features.peak_flops import PEAKS

__all__ = ["DEVICES", "Device", "Operation", "Seconds", "Sent", "Work"]


@dataclass(frozen=True)
class Seconds:
    """Estimated time of a step: of each part by itself, at the device's published speeds."""

    compute: float
    communication: float

    @property
    def least(self) -> float:
        """Returns the time if all communication overlaps with computation."""
        return max(self.compute, self.communication)

    @property
    def most(self) -> float:
        """Returns the time if no communication overlaps with computation."""
        return self.compute + self.communication


@dataclass(frozen=True)
class Device:
    """Device: bytes of memory, dense operations per second by precision, bytes per second of memory and of links.

    A machine has `together` devices. `link` is the bandwidth to another device of the same machine, one way, and
    `network` that to other machines, for each device.
    """

    name: str
    memory: float
    fp32: float
    tf32: float
    half: float  # bf16 and fp16
    bandwidth: float
    link: float
    together: int
    source: str
    network: float = 50e9  # one port of 400 Gb/s

    def seconds(self, work: Work, ranks: int, *, tf32: bool) -> Seconds:
        """Estimates the time of `work` by the roofline of every operation (Williams et al., 2009).

        A collective takes the time on the slowest link that it crosses. A group of ranks that fits into a machine is
        assumed to be in one.
        """
        fast = self.tf32 if tf32 else self.fp32
        compute = sum(
            count
            * max(
                one.flops / (self.half if one.dtype in (torch.bfloat16, torch.float16) else fast),
                one.moved / self.bandwidth,
            )
            for one, count in work.operations.items()
        )
        sending = sum(
            count * one.wire / (self.link if one.ranks <= self.together else self.network)
            for one, count in work.sent.items()
        )
        return Seconds(compute, sending)


def _device(name: str, memory: float, bandwidth: float, link: float, *, network: float = 50e9) -> Device:
    """Returns a device with the peak speeds of `PEAKS`, in a machine with eight."""
    peak = PEAKS[name.partition("-")[0]]
    fp32, tf32, half = (peak.flops(dtype) or 0.0 for dtype in ("fp32", "tf32", "bf16"))
    return Device(name, memory, fp32, tf32, half, bandwidth, link, 8, peak.source, network)


DEVICES = {
    one.name: one
    for one in (
        _device("h100", 80e9, 3.35e12, 450e9),
        _device("h200", 141e9, 4.8e12, 450e9),
        _device("a100-80", 80e9, 2.039e12, 300e9),
        _device("a100-40", 40e9, 1.555e12, 300e9),
        _device("l40s", 48e9, 864e9, 32e9),
        _device("rtx4090", 24e9, 1.008e12, 32e9, network=3.1e9),
        _device("mi300x", 192e9, 5.3e12, 448e9),
    )
}
"""By name; operations are without sparsity, and bandwidths are one way."""


_ATEN = torch.ops.aten
_NAMES = ("reduce_scatter", "all_gather", "all_reduce", "all_to_all", "broadcast", "send", "recv")
_SHORT = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all", "p2p": "send"}


class Operation(NamedTuple):
    """Kind of operation: floating-point operations, bytes read and written, dtype, and repeated operations."""

    flops: int
    moved: int
    dtype: torch.dtype
    repeated: int = 0  # of `flops`: attention's scores, which its backward pass computes again


class Sent(NamedTuple):
    """Collective over `ranks` ranks; `bytes` is the size of its whole tensor."""

    name: str
    ranks: int
    bytes: int

    @property
    def wire(self) -> float:
        """Returns the bytes that a rank sends, by the ring algorithms of NCCL and gloo (Patarasuk and Yuan, 2009)."""
        share = (self.ranks - 1) / self.ranks
        return self.bytes * {"all_reduce": 2 * share, "send": 1.0, "broadcast": 1.0, "recv": 0.0}.get(self.name, share)


class Work:
    """Work of a step: the count of each kind of operation, and of each collective."""

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
        """Returns a copy of the work so far."""
        return _of(self.operations.copy(), self.sent.copy())

    @property
    def flops(self) -> int:
        """Sums the floating-point operations of matrix products, convolutions and attention; a multiply-add is two."""
        return sum(one.flops * count for one, count in self.operations.items())

    @property
    def model_flops(self) -> int:
        """Sums the floating-point operations without the scores of attention that a backward pass computes again."""
        return sum((one.flops - one.repeated) * count for one, count in self.operations.items())

    def wire(self) -> dict[str, float]:
        """Returns the bytes that this rank sends, by collective and number of ranks: "all_gather over 8"."""
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
                flops = _flops(func, args, kwargs, found)
                again = "attention" in func._opname and func._opname.endswith("_backward")
                repeated = flops // 5 if again else 0  # one of its five products
                self.operations[Operation(flops, moved, dtype, repeated)] += 1

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
