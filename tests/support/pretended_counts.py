"""Callbacks for runs on pretended CUDA devices: the device of everything, and counts of each step."""

import ctypes
import json
import os
from pathlib import Path

import torch

from ddpforge.interfaces import Callback, RunContext, StepInfo

COUNTS = (
    *("launches", "products", "to_device", "to_host", "on_device", "unpinned"),
    *("fills", "waits", "events", "stream_waits", "segments", "pinned", "collectives", "registered"),
)


def counts() -> dict[str, int]:
    """Returns the counts since the start of this process, by the names in COUNTS."""
    numbers = (ctypes.c_longlong * len(COUNTS))()
    ctypes.CDLL(None).pretend_cuda_counts(numbers)
    return dict(zip(COUNTS, numbers, strict=True))


class OnGPU(Callback):
    """Fails the run unless the rank's weights are on its GPU. Writes the counts of the process at the end."""

    def __init__(self, *, file: str = "") -> None:
        self.file = file

    def on_start(self, run: RunContext) -> None:
        devices = {shard.tensor.device for shard in run.weights.shards().values()}
        assert devices == {run.world.device}
        assert run.world.device.type == "cuda"
        assert torch.cuda.current_device() == run.world.device.index

    def on_end(self, info: object) -> None:
        if self.file:
            Path(self.file).write_text(json.dumps(counts()))


class EachStep(Callback):
    """Writes the counts of rank 0 after each step and the allocator's peak, in bytes, in all steps but the first two.

    Ends the process with the last step, whose checkpoint would fail: kernels compute nothing, so that the memory of
    ranks that must be equal is not.
    """

    def __init__(self, *, file: str, steps: int) -> None:
        self.file, self.steps = file, steps
        self.rows: list[dict[str, int]] = []

    def on_step(self, info: StepInfo) -> None:
        self.rows.append(counts() | {"step": info.step})
        if info.step == 2:
            torch.cuda.reset_peak_memory_stats()
        if info.step == self.steps:
            peak = torch.cuda.max_memory_allocated()
            if os.environ.get("RANK", "0") == "0":
                Path(self.file).write_text(json.dumps({"rows": self.rows, "peak": peak}))
            if torch.distributed.is_initialized():
                torch.distributed.all_reduce(torch.zeros(1))  # over gloo: no rank ends before the others are here
            os._exit(0)
