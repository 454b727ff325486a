"""TensorBoard tracker: scalars, images, histograms, text and tables as event files in the run's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.errors import require
from ddpforge.interfaces import Histogram, MediaKind, Tracker

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(Tracker):
    """Writes event files to the folder `tensorboard` of the run: `tensorboard --logdir runs` shows all runs.

    After a rollback or a resume, a new event file makes TensorBoard hide later events of earlier files. The recipe and
    the end of the run are texts: `config`, `end`.
    """

    def __init__(
        self,
        flush_seconds: Annotated[
            int, Field(ge=1, le=3600, description="Maximum delay in seconds until logged values are visible.")
        ] = 10,
    ) -> None:
        require("tensorboard", "tensorboard")
        self._flush_seconds = flush_seconds

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Opens an event file."""
        self._folder, self._step = folder / "tensorboard", resumed_at or 0
        self._writer = self._open(-1 if resumed_at is None else resumed_at)
        self._writer.add_text("config", _code(json.dumps(config, indent=2, default=str)), self._step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one scalar for each metric."""
        self._step = step
        for metric, value in metrics.items():
            self._writer.add_scalar(metric, value, step)

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        """Writes an image, a histogram or a text; a table becomes a Markdown text."""
        writer: Any = self._writer
        if kind == "image":
            writer.add_image(name, value, step, dataformats="HWC")
        elif kind == "histogram":
            _add_histogram(writer, name, value, step)
        else:
            writer.add_text(name, _markdown(value) if kind == "table" else _code(value), step)

    def rewind(self, step: int) -> None:
        """Opens another event file, which invalidates later steps of earlier files."""
        self._writer.close()
        self._writer = self._open(step)

    def join(self, folder: Path) -> bool:
        """Opens an event file in a folder of its own: TensorBoard reads only the newest file of a folder."""
        from torch.utils.tensorboard import SummaryWriter

        own = folder / "tensorboard" / f"evaluations-{gethostname()}-{os.getpid()}"
        self._writer = SummaryWriter(str(own), flush_secs=self._flush_seconds)
        return True

    def leave(self) -> None:
        """Closes the event file."""
        self._writer.close()

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Writes the text `end` and closes the event file."""
        end = json.dumps({"state": state, **summary}, indent=2)
        self._writer.add_text("end", _code(end), self._step)
        self._writer.close()

    def _open(self, after: int) -> SummaryWriter:
        from torch.utils.tensorboard import SummaryWriter

        return SummaryWriter(str(self._folder), purge_step=after + 1, flush_secs=self._flush_seconds)


def _add_histogram(writer: Any, name: str, value: Histogram, step: int) -> None:
    import numpy as np

    counts, edges = np.asarray(value.counts), np.asarray(value.edges)
    middles = (edges[1:] + edges[:-1]) / 2
    writer.add_histogram_raw(
        name,
        min=edges[0],
        max=edges[-1],
        num=int(counts.sum()),
        sum=float((counts * middles).sum()),
        sum_squares=float((counts * middles**2).sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=counts.tolist(),
        global_step=step,
    )


def _code(text: str) -> str:
    """Formats text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _markdown(rows: Any) -> str:
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([str(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
