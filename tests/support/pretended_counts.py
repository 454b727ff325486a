"""Callbacks for runs on pretended CUDA devices: the device of everything, and counts of each step."""

import ctypes
import json
from pathlib import Path

import torch

from ddpforge.interfaces import Callback, RunContext, StepInfo

COUNTS = (
    *("launches", "products", "to_device", "to_host", "on_device", "unpinned"),
    *("fills", "waits", "events", "stream_waits", "segments", "pinned"),
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
    """Writes the counts after each step and the peak of the allocator, in bytes, of all steps but the first two."""

    def __init__(self, *, file: str) -> None:
        self.file = file
        self.rows: list[dict[str, int]] = []

    def on_step(self, info: StepInfo) -> None:
        self.rows.append(counts() | {"step": info.step})
        if info.step == 2:
            torch.cuda.reset_peak_memory_stats()

    def on_end(self, info: object) -> None:
        peak = torch.cuda.max_memory_allocated()
        Path(self.file).write_text(json.dumps({"rows": self.rows, "peak": peak}))
