"""Trackers, to which metrics are sent, and whatever else is shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpforge.interfaces.shown import ShownKind

__all__ = ["Tracker"]


class Tracker:
    """Receives metrics. This base class is the null tracker. Only the main rank has real ones.

    No method may raise into training or block it for long: a tracker is a mirror, `metrics.jsonl` is the truth.
    """

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Called once before the first step; `resumed_at` is the step that training resumes from."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row: metrics of `step`, with their `train/` and `eval/` prefixes."""

    def show(self, step: int, name: str, value: Any, kind: ShownKind) -> None:
        """Displays what a callback or a task shows at `step`; who cannot display a kind ignores it.

        An image is a numpy array, uint8 [height, width, 3]; a histogram a `Histogram`; text a string; a table a list of
        rows, see `Table`. What is shown again under a name at one step replaces the former.
        """

    def checkpoint(self, step: int, folder: Path) -> None:
        """A checkpoint was committed in `folder`; retention may remove it later."""

    def rewind(self, step: int) -> None:
        """Training went back to `step`: rows after it are superseded and will be logged again, and so is what was
        shown.
        """

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Called once at the end; `state` is that of `status.json` (done, failed, preempted, diverged)."""
