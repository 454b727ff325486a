"""Trackers, to which metrics are sent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Tracker"]


class Tracker:
    """Receives metrics. This base class is the null tracker. Only the main rank has real ones.

    No method may raise into training or block it for long: a tracker is a mirror, `metrics.jsonl` is the truth.
    """

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Called once before the first step; `resumed_at` is the step that training goes on from."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """One row: metrics of `step`, with their `train/` and `eval/` prefixes."""

    def rewind(self, step: int) -> None:
        """Training went back to `step`: rows after it are superseded and will be logged again."""

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Called once at the end; `state` is that of `status.json` (done, failed, stopped, diverged)."""
