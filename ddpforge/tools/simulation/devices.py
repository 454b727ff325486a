"""Devices to plan for: memory and speeds as their makers publish them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ddpforge.tools.simulation.work import Work

__all__ = ["DEVICES", "Device", "Seconds"]


@dataclass(frozen=True)
class Seconds:
    """An estimate of a step's time: what each part takes by itself at the device's published speeds."""

    compute: float
    communication: float

    @property
    def least(self) -> float:
        """All communication hides behind what is computed."""
        return max(self.compute, self.communication)

    @property
    def most(self) -> float:
        """None of it does."""
        return self.compute + self.communication


@dataclass(frozen=True)
class Device:
    """A device: bytes of memory, dense operations a second by precision, bytes a second of memory and of links.

    `link` is that to another device of the same machine, one way, of which there are `together`; `network` that to
    other machines, for each device.
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
        """The roofline of every operation (Williams et al., 2009), and the time that collectives take on the slowest
        link that they cross, if each group of ranks that fits into a machine lies in one.
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


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
DEVICES = {
    one.name: one
    for one in (
        Device("h100", 80e9, 67e12, 494.7e12, 989.4e12, 3.35e12, 450e9, 8, f"{_NVIDIA}/h100/, SXM"),
        Device("h200", 141e9, 67e12, 494.7e12, 989.4e12, 4.8e12, 450e9, 8, f"{_NVIDIA}/h200/, SXM"),
        Device("a100-80", 80e9, 19.5e12, 156e12, 312e12, 2.039e12, 300e9, 8, f"{_NVIDIA}/a100/, SXM"),
        Device("a100-40", 40e9, 19.5e12, 156e12, 312e12, 1.555e12, 300e9, 8, f"{_NVIDIA}/a100/, SXM"),
        Device("l40s", 48e9, 91.6e12, 183e12, 362.05e12, 864e9, 32e9, 8, f"{_NVIDIA}/l40s/"),
        Device(
            *("rtx4090", 24e9, 82.6e12, 82.6e12, 165.2e12, 1.008e12, 32e9, 8),
            "NVIDIA Ada GPU Architecture whitepaper, appendix A",
            network=3.1e9,
        ),
        Device(
            *("mi300x", 192e9, 163.4e12, 653.7e12, 1307.4e12, 5.3e12, 448e9, 8),
            "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
        ),
    )
}
"""By name; rates are dense, without sparsity, and one way."""
