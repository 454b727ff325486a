"""Pictures, histograms, text and tables: what callbacks show and trackers display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

__all__ = ["Histogram", "Show", "ShownKind", "Table"]

ShownKind = Literal["image", "histogram", "text", "table"]

Table = Sequence[Mapping[str, "str | int | float | bool | None"]]
"""Rows that all have the same columns, in the same order."""


@dataclass(frozen=True)
class Histogram:
    """Counts of the numbers between neighbouring `edges`; `nonfinite` others were NaN or infinite."""

    counts: tuple[int, ...]
    edges: tuple[float, ...]  # one more than counts
    nonfinite: int = 0


class Show(Protocol):
    """Shows something of the present step in every tracker that can, and in the run's folder.

    Only the main rank's counts; the others may call it or not. `name` is like that of a metric: words of letters,
    digits, `.`, `_` and `-`, with `/` between them. What is shown again under a name at one step replaces the former.
    Raises PluginError for a value of another form than its kind has; one of the right form whose numbers cannot be
    shown (an image with NaN, or beyond 0 to 1) is left out with a warning, as training must not end for a picture.

    - "image": a tensor or array, [height, width], [1 or 3, height, width], or [N, channels, height, width], which
      becomes a grid; floats from 0 to 1, or uint8.
    - "histogram": a tensor, array or sequence of numbers, of any shape; or a `Histogram`.
    - "text": a string.
    - "table": rows as mappings from column to a number, string, bool or None; each with the same columns.
    """

    def __call__(self, name: str, value: Any, kind: ShownKind) -> None:
        """Takes a copy; reading a tensor waits for the device."""
