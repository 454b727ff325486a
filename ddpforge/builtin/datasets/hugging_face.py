"""Datasets of Hugging Face, by their name on the hub or from files: in memory maps, or streamed shard by shard."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, keep, library, numeric
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.interfaces import PartedData

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["hugging_face"]

_PICKLED = {"pandas", "pickle", "cache", "generator", "spark"}  # forms of datasets that unpickle, or run what is named

log = logging.getLogger("ddpforge")


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
    index: Annotated[
        str | None,
        Field(
            description="With `streaming`: a folder that keeps the number of rows of each file. What does not say it is"
            " read whole for that, once."
        ),
    ] = None,
    classes: Classes = None,
    shuffle: Shuffle = False,
    shuffle_buffer: Window = 1,
    interleave: Lanes = (8, 4),
) -> Rows | Streamed | Shards:
    """A dataset of `datasets.load_dataset`; a sample is the tuple of the chosen columns: lists and images
    are arrays, and floats of any size float32.

    Without `streaming` it is on disk and mapped, and any order can be had of it; its columns are what `by` of an order
    names. With `streaming` each rank and loader process reads its own shards, and a resume enters them: of parquet
    files, as most datasets on the hub are, row groups, whose lengths are in the files' footers; of others (JSON, CSV,
    text, arrow, tar), files, whose rows are counted where `index` names a folder, or whose lengths `shard_lengths`
    says. Without either, and of one file alone, nobody can know beforehand which samples form a step: every rank reads
    all of it and keeps its part, and a resume reads it again from the start.

    Raises EnvironmentProblem for what cannot be loaded, and UsageError for columns that there are not.
    """
    if not streaming and (shard_lengths or index or shuffle or shuffle_buffer > 1):
        raise UsageError(
            "shard_lengths, index, shuffle and shuffle_buffer are for streaming = true; see [data.sampler]"
        )
    if shard_lengths and index:
        raise UsageError("shard_lengths and index both say how long the shards are: name one of them")
    options: dict[str, Any] = {"revision": revision} | ({"data_files": data_files} if data_files else {})
    data, builder = _loaded(path, name, split, streaming, options)
    features = data.features or {}
    if features and (missing := [column for column in columns if column not in features]):
        raise UsageError(f"columns: {path} has no `{missing[0]}`", hints=[f"it has {', '.join(features)}"])
    number = classes or next((one.num_classes for one in features.values() if hasattr(one, "num_classes")), None)
    if not streaming:
        return Rows(data.select_columns(list(columns)), columns, number)
    lengths = _lengths(shard_lengths, data.num_shards) if shard_lengths else None
    if lengths is None:
        data, lengths = _in_parts(data, builder, split, index)
    data = data.select_columns(list(columns)) if features else data
    if lengths is None:
        return Streamed(data, columns, number)
    return Shards(data, columns, number, lengths, shuffle, shuffle_buffer, interleave)


def _loaded(path: str, name: str | None, split: str, streaming: bool, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the dataset and, of a stream, its builder; raises EnvironmentProblem for one that cannot be loaded."""
    if path in _PICKLED:
        raise UsageError(
            f'path: "{path}" reads pickles, which may run code', hints=["write parquet: pandas.DataFrame.to_parquet"]
        )
    datasets = library("datasets", "datasets")
    try:
        if not streaming:
            return datasets.load_dataset(path, name, split=split, **options), None
        builder = datasets.load_dataset_builder(path, name, **options)
        return builder.as_streaming_dataset(split=split), builder
    except (OSError, ValueError, ConnectionError) as error:
        raise EnvironmentProblem(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error


class _Tuples:
    """Rows as tuples of the chosen columns."""

    random = False

    def __init__(self, data: Any, columns: Sequence[str], classes: int | None) -> None:
        self._data, self._columns = data, list(columns)
        if classes is not None:
            self.classes = classes

    def collate(self, samples: list[Mapping[str, Any]]) -> Any:
        """A batch: tensors where samples hold numbers."""
        from torch.utils.data import default_collate

        rows = [tuple(numeric(row[column]) for column in self._columns) for row in samples]
        for column, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            _check_shapes(column, values)
        return default_collate(rows)


class Rows(_Tuples):
    """A dataset on disk, mapped into memory."""

    forkable = True

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
        import numpy as np

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
        shuffle_buffer: int,
        interleave: tuple[int, int],
    ) -> None:
        super().__init__(data, columns, classes)
        self.parts, self.shuffle, self.shuffle_buffer, self.interleave = parts, shuffle, shuffle_buffer, interleave

    def open(self, part: int, *, epoch: int, skip: int) -> Iterator[Mapping[str, Any]]:
        """The rows of a shard; datasets reads over those that are skipped."""
        return iter(self._data.shard(len(self.parts), part).skip(skip))


def _check_shapes(column: str, values: Sequence[Any]) -> None:
    """Raises UsageError for arrays that make no batch."""
    import numpy as np

    shapes = {value.shape: None for value in values if isinstance(value, np.ndarray)}
    if len(shapes) > 1:
        one, other, *_ = (list(shape) for shape in shapes)
        raise UsageError(
            f"columns: rows of different lengths in `{column}`: {one} and {other}",
            hints=["cut or pad them to one length before training, or write a dataset with a `collate` that pads"],
        )


def _in_parts(data: Any, builder: Any, split: str, index: str | None) -> tuple[Any, list[int] | None]:
    """The stream, cut as far as it can be, and the lengths of its shards; None for one that must be read whole."""
    files = _files(builder, split)
    parquet = library("datasets.packaged_modules.parquet.parquet", "datasets").Parquet
    if files and isinstance(builder, parquet) and builder.config.filters is None:
        return data.reshard(), _measured(files, builder, index, _row_groups)
    if data.num_shards == 1 or data.num_shards != len(files):
        why = "it does not come in several files that can be read each by itself"
    elif index is None:
        why = f"name a folder as `index` to have the rows of its {len(files)} files counted once"
    else:
        in_tables = isinstance(builder, library("datasets", "datasets").ArrowBasedBuilder)
        return data, _measured(files, builder, index, partial(_rows, data, in_tables))
    log.info("%s (%s) is read whole by every rank and loader process: %s", builder.dataset_name, split, why)
    return data, None


def _files(builder: Any, split: str) -> list[tuple[str, Any]]:
    """The files of a split, in the order of its shards, each with what changes when it is rewritten."""
    found: list[tuple[str, Any]] = []
    known = builder.config.data_files or {}
    for name in known if split == "all" else split.split("+"):
        files = known.get(name.strip(), [])
        versions = getattr(files, "origin_metadata", [])
        if len(versions) != len(files):  # those of other files are among them
            every = any(versions) and library("datasets.fingerprint", "datasets").Hasher.hash(versions)
            versions = [every] * len(files)
        found += zip(files, versions, strict=True)
    return found


def _measured(
    files: Sequence[tuple[str, Any]], builder: Any, index: str | None, find: Callable[[int, str], NDArray[np.int64]]
) -> list[int]:
    """The lengths of all parts, found file by file."""
    options = {key: value for key, value in vars(builder.config).items() if key != "data_files"}
    found: dict[int, NDArray[np.int64]] = {}
    for number in random.SystemRandom().sample(range(len(files)), len(files)):  # ranks with one index share the work
        file, version = files[number]
        facts = [type(builder).__name__, options, file, version]
        found[number] = keep(index if version else None, Path(file).stem, facts, partial(find, number, file))
    return [int(rows) for number in range(len(files)) for rows in found[number]]


def _row_groups(number: int, file: str) -> NDArray[np.int64]:
    """The number of rows of each row group of a file, from its footer."""
    import numpy as np

    with library("fsspec", "datasets").open(file) as opened:
        footer = library("pyarrow.parquet", "datasets").ParquetFile(opened).metadata
    return np.array([footer.row_group(group).num_rows for group in range(footer.num_row_groups)], dtype=np.int64)


def _rows(data: Any, in_tables: bool, number: int, file: str) -> NDArray[np.int64]:
    """The number of rows of a file, counted; nothing is decoded."""
    import numpy as np

    shard = data.shard(data.num_shards, number)
    try:
        if in_tables:
            return np.array([sum(map(len, shard.with_format("arrow").iter(1000)))])
        return np.array([sum(1 for _ in (shard.decode(False) if shard.features else shard))])
    except (OSError, ValueError) as error:  # pyarrow's own are ValueErrors
        raise EnvironmentProblem(f"{file} cannot be read: {error}") from error


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
