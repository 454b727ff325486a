"""Dataset of parquet files, read row group by row group with pyarrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, find_files, numeric
from ddpforge.errors import SetupError, UsageError, library
from ddpforge.interfaces import ShardedDataset

__all__ = ["Parquet"]

_AT_ONCE = 256  # rows that are converted together


class Parquet(ShardedDataset):
    """Rows of parquet files; a sample is the tuple of the chosen columns.

    Lists of numbers (of any depth, if they are rectangular) become arrays. Floats of any size become float32. Integers,
    strings and bytes do not change. The parts are row groups: with small row groups (some thousand rows), more
    processes can read at the same time.

    Raises:
        SetupError: A file does not exist, or is not a parquet file.
        UsageError: A column does not exist.
    """

    random = False
    seekable = False

    def __init__(
        self,
        *,
        path: Annotated[str, Field(min_length=1, description='Folder, file, or pattern: "train-*.parquet".')],
        columns: Annotated[
            Sequence[str], Field(min_length=1, description="Columns of a sample, in the tuple's order.")
        ],
        classes: Classes = None,
        shuffle: Shuffle = False,
        shuffle_buffer: Window = 1,
        interleave: Lanes = (8, 4),
    ) -> None:
        self._columns = list(columns)
        self._groups: list[tuple[str, int]] = []
        self.shard_sizes: list[int] = []
        for file in map(str, find_files(path, ".parquet")):
            self._look(file)
        self.shuffle, self.shuffle_buffer, self.interleave = shuffle, shuffle_buffer, interleave
        if classes is not None:
            self.classes = classes

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[tuple[Any, ...]]:
        """Yields the rows of a row group."""
        file, group = self._groups[part]
        with library("pyarrow.parquet", "parquet").ParquetFile(file) as opened:
            for batch in opened.iter_batches(_AT_ONCE, row_groups=[group], columns=self._columns):
                skipped = min(skip, len(batch))
                skip -= skipped
                values = [batch.column(name)[skipped:].to_pylist() for name in self._columns]
                yield from zip(*values, strict=True)

    def prepare(self, sample: tuple[Any, ...]) -> tuple[Any, ...]:
        """Converts lists to arrays, and floats to float32."""
        return tuple(map(numeric, sample))

    def _look(self, file: str) -> None:
        """Adds a file's row groups to the parts; reads only its footer."""
        try:
            with library("pyarrow.parquet", "parquet").ParquetFile(file) as opened:
                about, names = opened.metadata, opened.schema_arrow.names
        except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
            raise SetupError(f"path: {file} is not a parquet file: {error}") from error
        if missing := [name for name in self._columns if name not in names]:
            raise UsageError(f"columns: {file} has no `{missing[0]}`", hints=[f"it has {', '.join(names)}"])
        for group in range(about.num_row_groups):
            self._groups.append((file, group))
            self.shard_sizes.append(about.row_group(group).num_rows)
