"""Measures time per step, peak memory, and model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import Callback, RunContext, StepInfo, device_kind
from ddpforge.machine import peak_memory

PositiveFlops = Annotated[float, Field(gt=0, le=1e30)]


class Throughput(Callback):
    """Adds columns to every row of training metrics.

    - `perf/step_seconds`: wall time per step, averaged since the last row.
    - `perf/peak_memory_gib`: peak memory of the main rank so far: allocated on the GPU, or resident on the CPU.
    - `perf/mfu`, with both options: FLOPs of the samples since the last row, as a fraction of the peak FLOPs of all
      devices; starts with the second row. Rows have it without options, too, if ddpforge knows the device's peak; for
      another device state only `peak_flops`.

    Raises UsageError in training if `perf/mfu` is above 1.
    """

    def __init__(
        self,
        flops_per_sample: Annotated[
            PositiveFlops | None, Field(description="FLOPs of the forward and backward pass of one sample.")
        ] = None,
        peak_flops: Annotated[
            PositiveFlops | None, Field(description="Peak FLOPs per second of one device in the compute dtype.")
        ] = None,
    ) -> None:
        if flops_per_sample is not None and peak_flops is None:
            raise ValueError("flops_per_sample: it requires peak_flops")
        self.flops_per_sample = flops_per_sample
        self.peak_flops = peak_flops
        self._last: StepInfo | None = None

    def on_start(self, run: RunContext) -> None:
        """Stores the world."""
        self._world = run.world

    def on_log(self, info: StepInfo) -> Mapping[str, float]:
        """Returns the columns of this row."""
        peak = device_kind(self._world.device).peak_memory(self._world.device)
        columns = {
            "perf/step_seconds": info.seconds,
            "perf/peak_memory_gib": (peak_memory() if peak is None else peak) / 2**30,  # None: of the process
        }
        if self._last and info.step > self._last.step and self.flops_per_sample and self.peak_flops:
            seconds = (info.step - self._last.step) * info.seconds
            samples = info.samples - self._last.samples
            share = self.flops_per_sample * samples / (self.peak_flops * self._world.global_ranks.size * seconds)
            if share > 1:
                raise UsageError(
                    f"peak_flops = {self.peak_flops:g} and flops_per_sample = {self.flops_per_sample:g} cannot both be "
                    f"right: the run has {share:.2f} times as many FLOPs per second",
                    hints=[
                        "peak_flops is the dense peak of one device; without flops_per_sample, ddpforge counts them"
                    ],
                )
            columns["perf/mfu"] = share
        self._last = info
        return columns
