"""Trackers, which receive metrics, images, histograms, text and tables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpforge.interfaces.media import MediaKind

__all__ = ["Tracker"]


class Tracker:
    """Receiver of metrics. This base class does nothing. Only the main rank has other trackers.

    No method may raise into training or block it for long. A tracker is a copy; `metrics.jsonl` is authoritative.
    """

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Starts the tracker; called once before the first step. `resumed_at` is the step of the resumed checkpoint."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receives one row: metrics of `step`, with their `train/` and `eval/` prefixes."""

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        """Displays a value of a callback or a task at `step`; ignores kinds that the tracker cannot display.

        An image is a numpy array, uint8 [height, width, 3]; a histogram a `Histogram`; text a string; a table a list of
        rows, see `Table`. A second value for the same name and step replaces the first.
        """

    def checkpoint(self, step: int, folder: Path) -> None:
        """Called after a checkpoint was committed in `folder`; retention may remove it later."""

    def rewind(self, step: int) -> None:
        """Discards rows and displayed values after `step`: training went back to it, and will log them again."""

    def join(self, folder: Path) -> bool:
        """Opens the tracked run of `folder` in another process than the one that trains, to log evaluations to it.

        Returns False if the tracker cannot do this, as this one. Replaces `start`; `leave` replaces `finish`.
        """
        return False

    def leave(self) -> None:
        """Ends what `join` began; the run itself goes on."""

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Ends the tracker; called once. `state` is that of `status.json` (done, failed, preempted, diverged)."""
