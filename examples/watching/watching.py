"""Custom tracker, and callbacks that log gradient histograms, profile some steps, and stop at a target."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from ddpforge.interfaces import Callback, RunContext, StepInfo, Tracker


class Spreadsheet(Tracker):
    """Writes "step, name, value" to `values.csv`. A step that is logged twice has two rows."""

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        self.file = (folder / "values.csv").open("a", newline="")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        csv.writer(self.file).writerows((step, name, value) for name, value in metrics.items())

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        self.file.close()


class GradientHistograms(Callback):
    """Logs a histogram of the reduced gradient of each weight every `every` steps, to trackers that support it."""

    def __init__(self, *, every: int = 50) -> None:
        self.every = every

    def on_start(self, run: RunContext) -> None:
        self.run = run

    def on_gradient(self, step: int, norm: Tensor) -> None:
        if step % self.every == 0:
            for name, part in self.run.gradients().items():
                self.run.log_media(f"gradient/{name}", part.tensor, "histogram")


class Profile(Callback):
    """Profiles rank 0 from the end of step `first` to step `last`; `profile.json` is for https://ui.perfetto.dev."""

    def __init__(self, *, first: int = 3, last: int = 5) -> None:
        self.first, self.last = first, last
        self.profile: profile | None = None

    def on_start(self, run: RunContext) -> None:
        self.run = run

    def on_step(self, info: StepInfo) -> None:
        if info.step == self.first and self.run.world.is_rank_zero:
            self.profile = profile(activities=[ProfilerActivity.CPU])
            self.profile.start()
        if info.step == self.last and self.profile:
            self.profile.stop()
            self.profile.export_chrome_trace(str(self.run.folder / "profile.json"))


class StopAt(Callback):
    """Ends training when an evaluation metric is at least `target`."""

    def __init__(self, *, metric: str, target: float) -> None:
        self.metric, self.target = metric, target

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> bool:
        return metrics[self.metric] >= self.target
