"""Images, histograms, text and tables that callbacks and tasks pass to trackers for display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = ["Histogram", "LogMedia", "MediaKind", "Table"]

MediaKind = Literal["image", "histogram", "text", "table"]

Table = Sequence[Mapping[str, "str | int | float | bool | None"]]
"""Rows with the same columns in the same order."""


@dataclass(frozen=True)
class Histogram:
    """Histogram: number of values between neighboring `edges`; `nonfinite` counts NaN and infinite values."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]  # one more than counts
    nonfinite: int = 0


class LogMedia(Protocol):
    """Function that displays a value of the current step in every tracker that supports it, and in the run's folder.

    Only the main rank's call has an effect; other ranks may call it. `name` has the form of a metric's name: words of
    letters, digits, `.`, `_` and `-`, separated by `/`. A second value for the same name and step replaces the first.

    - "image": a tensor or array, [height, width], [1 or 3, height, width], or [N, channels, height, width], which
      becomes a grid; floats from 0 to 1, or uint8.
    - "histogram": a tensor, array or sequence of numbers, of any shape; or a `Histogram`.
    - "text": a string.
    - "table": rows as mappings from column to a number, string, bool or None; all with the same columns.

    Values that cannot be displayed, such as an image with NaN or outside of 0 to 1, are skipped with a warning.

    Raises:
        PluginError: The type or shape of the value does not fit its kind.
    """

    def __call__(self, name: str, value: Any, kind: MediaKind) -> None:
        """Copies `value` and displays it; reading a tensor waits for the device."""
