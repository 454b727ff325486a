"""Datasets of Hugging Face, by their name on the hub or from files: in memory maps, or streamed shard by shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from torch.utils.data import default_collate

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, library, numeric
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.interfaces import PartedData

__all__ = ["hugging_face"]


def hugging_face(
    *,
    path: Annotated[
        str,
        Field(min_length=1, description='A name on the hub, a folder, or a form: "parquet", "json", "csv".'),
    ],
    split: Annotated[str, Field(min_length=1, description='For example "train" or "train[:90%]".')],
    columns: Annotated[Sequence[str], Field(min_length=1, description="In the order of the tuple that is a sample.")],
    name: Annotated[str | None, Field(description="The configuration, where a dataset has several.")] = None,
    data_files: Annotated[
        str | Sequence[str] | None, Field(description="Files or patterns, where `path` is a form.")
    ] = None,
    revision: Annotated[str | None, Field(description="A commit or tag of the hub, for data that stays.")] = None,
    streaming: Annotated[bool, Field(description="Read while training, without a copy on this machine.")] = False,
    shard_lengths: Annotated[
        Path | None,
        Field(
            description="With `streaming`: a file with the number of samples in each shard, one a line. Parquet files"
            " say it themselves."
        ),
    ] = None,
    classes: Classes = None,
    shuffle: Shuffle = False,
    window: Window = 1,
    lanes: Lanes = (8, 4),
) -> Rows | Streamed | Shards:
    """A dataset of `datasets.load_dataset`; a sample is the tuple of the chosen columns: lists and images
    are arrays, and floats of any size float32.

    Without `streaming` it is on disk and mapped, and any order can be had of it; its columns are what `by` of an order
    names. With `streaming` each rank and loader process reads its own shards, and a resume enters them: of parquet
    files, as most datasets on the hub are, row groups, whose lengths are in the files' footers; of others, shards whose
    lengths `shard_lengths` says. Of another form without those nobody can know beforehand which samples form a step:
    every rank reads all of it and keeps its part, and a resume reads it again from the start.

    Raises EnvironmentProblem for what cannot be loaded, and UsageError for columns that there are not.
    """
    datasets = library("datasets", "datasets")
    if not streaming and (shard_lengths or shuffle or window > 1):
        raise UsageError("shard_lengths, shuffle and window are for streaming = true; see [data.order] for others")
    options: dict[str, Any] = {"revision": revision} | ({"data_files": data_files} if data_files else {})
    try:
        if streaming:
            builder = datasets.load_dataset_builder(path, name, **options)
            data = builder.as_streaming_dataset(split=split)
        else:
            data = datasets.load_dataset(path, name, split=split, **options)
    except (OSError, ValueError, ConnectionError) as error:
        raise EnvironmentProblem(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    features = data.features or {}
    if features and (missing := [column for column in columns if column not in features]):
        raise UsageError(f"columns: {path} has no `{missing[0]}`", hints=[f"it has {', '.join(features)}"])
    number = classes or next((one.num_classes for one in features.values() if hasattr(one, "num_classes")), None)
    if not streaming:
        return Rows(data.select_columns(list(columns)), columns, number)
    lengths = _lengths(shard_lengths, data.num_shards) if shard_lengths else None
    if lengths is None and (lengths := _row_groups(builder, split)):
        data = data.reshard()
    data = data.select_columns(list(columns)) if features else data
    if lengths is None:
        return Streamed(data, columns, number)
    return Shards(data, columns, number, lengths, shuffle, window, lanes)


class _Tuples:
    """Rows as tuples of the chosen columns."""

    random = False

    def __init__(self, data: Any, columns: Sequence[str], classes: int | None) -> None:
        self._data, self._columns = data, list(columns)
        if classes is not None:
            self.classes = classes

    def collate(self, samples: list[Mapping[str, Any]]) -> Any:
        """A batch: tensors where samples hold numbers."""
        rows = [tuple(numeric(row[column]) for column in self._columns) for row in samples]
        for column, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            _check_shapes(column, values)
        return default_collate(rows)


class Rows(_Tuples):
    """A dataset on disk, mapped into memory."""

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._data[index]
        return row

    def __getitems__(self, ids: list[int]) -> list[Mapping[str, Any]]:
        """The rows at these places, read together."""
        found = self._data[ids]
        return [
            dict(zip(self._columns, row, strict=True)) for row in zip(*(found[c] for c in self._columns), strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        """A column, for orders: one value per sample."""
        if name.startswith("_") or name not in self._columns:
            raise AttributeError(name)
        return np.array(self._data[name])


class Streamed(_Tuples):
    """A stream whose length nobody knows: read by every rank, dealt out by ddpforge."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._data)


class Shards(_Tuples, PartedData):
    """A stream in shards of known length."""

    jumps = False

    def __init__(
        self,
        data: Any,
        columns: Sequence[str],
        classes: int | None,
        parts: Sequence[int],
        shuffle: bool,
        window: int,
        lanes: tuple[int, int],
    ) -> None:
        super().__init__(data, columns, classes)
        self.parts, self.shuffle, self.window, self.lanes = parts, shuffle, window, lanes

    def open(self, part: int, *, epoch: int, skip: int) -> Iterator[Mapping[str, Any]]:
        """The rows of a shard; datasets reads over those that are skipped."""
        return iter(self._data.shard(len(self.parts), part).skip(skip))


def _check_shapes(column: str, values: Sequence[Any]) -> None:
    """Raises UsageError for arrays that make no batch."""
    shapes = {value.shape: None for value in values if isinstance(value, np.ndarray)}
    if len(shapes) > 1:
        one, other, *_ = (list(shape) for shape in shapes)
        raise UsageError(
            f"columns: rows of different lengths in `{column}`: {one} and {other}",
            hints=["cut or pad them to one length before training, or write a dataset with a `collate` that pads"],
        )


def _row_groups(builder: Any, split: str) -> list[int] | None:
    """The number of rows of each row group of the split's parquet files, from their footers; None for other forms."""
    forms = library("datasets.packaged_modules.parquet.parquet", "datasets")
    if not isinstance(builder, forms.Parquet) or builder.config.filters is not None:
        return None
    found = []
    for file in builder.config.data_files[split]:
        with library("fsspec", "datasets").open(file) as opened:
            footer = library("pyarrow.parquet", "datasets").ParquetFile(opened).metadata
        found += [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    return found


def _lengths(path: Path, shards: int) -> list[int]:
    if not path.is_file():
        raise EnvironmentProblem(f"shard_lengths: no such file: {path}", hints=[f"looked in {Path.cwd()}"])
    try:
        lengths = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except ValueError as error:
        raise UsageError(f"shard_lengths: {path} must hold one number a line: {error}") from error
    if len(lengths) != shards:
        raise UsageError(f"shard_lengths: {path} holds {len(lengths)} numbers, and the dataset has {shards} shards")
    return lengths
