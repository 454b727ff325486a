"""Measures time per step, peak memory, and the share of the hardware's peak that is used."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ddpforge.interfaces import Callback, RunContext, StepInfo

if TYPE_CHECKING:
    import torch

PositiveFlops = Annotated[float, Field(gt=0, le=1e30)]


class Throughput(Callback):
    """Adds columns to every row of training metrics; the memory is that of the main rank.

    - `perf/step_seconds`: wall time of a step, averaged since the last row;
    - `perf/peak_memory_gib`: the most memory ever allocated on the GPU, or resident in a process without one;
    - `perf/mfu`: the share of the devices' peak FLOPs that went into samples really trained on since the last
      row; from the second row on, and only with both options.
    """

    def __init__(
        self,
        flops_per_sample: Annotated[
            PositiveFlops | None, Field(description="FLOPs of a sample's forward and backward pass.")
        ] = None,
        peak_flops: Annotated[
            PositiveFlops | None, Field(description="FLOPs per second of one device in the compute dtype.")
        ] = None,
    ) -> None:
        if (flops_per_sample is None) != (peak_flops is None):
            raise ValueError("flops_per_sample and peak_flops belong together: set both or neither")
        self._flops_per_sample = flops_per_sample
        self._peak_flops = peak_flops
        self._last: StepInfo | None = None

    def on_start(self, run: RunContext) -> None:
        """Remembers the devices."""
        self._world = run.world

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        """The columns of this row."""
        columns = {
            "perf/step_seconds": info.seconds,
            "perf/peak_memory_gib": _peak_memory(self._world.device),
        }
        if self._last and info.step > self._last.step and self._flops_per_sample and self._peak_flops:
            seconds = (info.step - self._last.step) * info.seconds
            samples = info.samples - self._last.samples
            columns["perf/mfu"] = self._flops_per_sample * samples / (self._peak_flops * self._world.all.size * seconds)
        self._last = info
        return columns


def _peak_memory(device: torch.device) -> float:
    """In GiB."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts it in KiB
