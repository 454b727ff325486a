"""Rows of parquet files, read row group by row group through pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, find_files, library, numeric
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.interfaces import PartedData

__all__ = ["Parquet"]

_AT_ONCE = 256  # rows that are turned into numbers together


class Parquet(PartedData):
    """Rows of parquet files; a sample is the tuple of the chosen columns.

    Lists of numbers (of any depth, if they are rectangular) become arrays; integers, text and bytes stay what they are.
    Floats of any size become float32. The parts are row groups: writing small ones (some thousand rows) lets more
    processes read at once.

    Raises EnvironmentProblem where there is no such file or it is no parquet file, and UsageError for columns that it
    does not have.
    """

    random = False
    jumps = False

    def __init__(
        self,
        *,
        path: Annotated[str, Field(min_length=1, description='A folder, a file, or a pattern: "train-*.parquet".')],
        columns: Annotated[Sequence[str], Field(min_length=1, description="In the order of the tuple.")],
        classes: Classes = None,
        shuffle: Shuffle = False,
        shuffle_buffer: Window = 1,
        interleave: Lanes = (8, 4),
    ) -> None:
        self._columns = list(columns)
        self._groups: list[tuple[str, int]] = []
        self.parts: list[int] = []
        for file in map(str, find_files(path, ".parquet")):
            self._look(file)
        self.shuffle, self.shuffle_buffer, self.interleave = shuffle, shuffle_buffer, interleave
        if classes is not None:
            self.classes = classes

    def open(self, part: int, *, epoch: int, skip: int) -> Iterator[tuple[Any, ...]]:
        """The rows of a row group."""
        file, group = self._groups[part]
        with library("pyarrow.parquet", "parquet").ParquetFile(file) as opened:
            for batch in opened.iter_batches(_AT_ONCE, row_groups=[group], columns=self._columns):
                skipped = min(skip, len(batch))
                skip -= skipped
                values = [batch.column(name)[skipped:].to_pylist() for name in self._columns]
                yield from zip(*values, strict=True)

    def prepare(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        """Lists as arrays."""
        return tuple(map(numeric, sample))

    def _look(self, file: str) -> None:
        """Takes note of a file's row groups; reads its footer only."""
        try:
            with library("pyarrow.parquet", "parquet").ParquetFile(file) as opened:
                about, names = opened.metadata, opened.schema_arrow.names
        except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
            raise EnvironmentProblem(f"path: {file} is not a parquet file: {error}") from error
        if missing := [name for name in self._columns if name not in names]:
            raise UsageError(f"columns: {file} has no `{missing[0]}`", hints=[f"it has {', '.join(names)}"])
        for group in range(about.num_row_groups):
            self._groups.append((file, group))
            self.parts.append(about.row_group(group).num_rows)
