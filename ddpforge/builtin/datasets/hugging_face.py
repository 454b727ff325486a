"""Datasets of Hugging Face, by name on the hub or from files: memory-mapped, or streamed shard by shard."""

from __future__ import annotations

import logging
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from ssl import SSLError
from typing import TYPE_CHECKING, Annotated, Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from pydantic import Field

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, keep, numeric
from ddpforge.errors import SetupError, UsageError, library, not_there, unexpanded
from ddpforge.interfaces import ShardedDataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["hub_fault", "hugging_face", "load_split"]

_FORMATS = {"jsonl": "json", "ndjson": "json", "tsv": "csv", "txt": "text"}  # by names that people try
_BUILDERS = ("json", "csv", "parquet", "text", "arrow")
_PICKLED = {"pandas", "pickle", "cache", "generator", "spark"}  # builders that unpickle, or run code

_PATIENCE = 5.0  # seconds until the hub must answer
_SPLITS = r"Unknown split .* one of \[(.*)\]|Unrecognized instruction format()|Instruction .* corresponds to no data()"

log = logging.getLogger("ddpforge")


def hugging_face(
    *,
    path: Annotated[
        str,
        Field(min_length=1, description='A name on the hub, a folder, or a format: "parquet", "json", "csv".'),
    ],
    split: Annotated[str, Field(min_length=1, description='For example "train" or "train[:90%]".')],
    columns: Annotated[Sequence[str], Field(min_length=1, description="Columns of a sample, in the tuple's order.")],
    name: Annotated[str | None, Field(description="Configuration, if a dataset has several.")] = None,
    data_files: Annotated[
        str | Sequence[str] | None, Field(description="Files or patterns, if `path` is a format.")
    ] = None,
    revision: Annotated[str | None, Field(description="Commit or tag on the hub, for reproducible data.")] = None,
    streaming: Annotated[
        bool, Field(description="Read the data during training, without a copy on this machine.")
    ] = False,
    shard_lengths: Annotated[
        Path | None,
        Field(
            description="With `streaming`: file with the number of samples in each shard, one per line. Not needed for"
            " parquet files."
        ),
    ] = None,
    index: Annotated[
        str | None,
        Field(
            description="With `streaming`: folder that caches the number of rows of each file. Files other than parquet"
            " are read completely once to count their rows."
        ),
    ] = None,
    classes: Classes = None,
    shuffle: Shuffle = False,
    shuffle_buffer: Window = 1,
    interleave: Lanes = (8, 4),
) -> HuggingFaceRows | Streamed | HuggingFaceShards:
    """Loads a dataset with `datasets.load_dataset`; a sample is the tuple of the chosen columns.

    Lists and images become arrays; floats of any size become float32.

    Without `streaming` the data is on disk and memory-mapped, and supports every sampler; option `by` of a sampler may
    name one of the columns.

    With `streaming` each rank and loader process reads its own shards, and a resume opens them at its position. Shards
    of parquet files, the format of most datasets on the hub, are row groups; their lengths are in the files' footers.
    Shards of other formats (JSON, CSV, text, arrow, tar) are files; their lengths come from `shard_lengths`, or are
    counted if `index` is a folder. Without either option, and for a single file, the lengths are unknown: every rank
    then reads all of the data and keeps its samples, and a resume reads it again from the start.

    Raises:
        SetupError: The dataset cannot be loaded.
        UsageError: A column does not exist, or options contradict each other.
    """
    if not streaming and (shard_lengths or index or shuffle or shuffle_buffer > 1):
        raise UsageError(
            "shard_lengths, index, shuffle and shuffle_buffer need streaming = true; without it, see [data.sampler]"
        )
    if shard_lengths and index:
        raise UsageError("shard_lengths and index both determine the lengths of shards: set only one of them")
    options: dict[str, Any] = {"revision": revision} | ({"data_files": data_files} if data_files else {})
    data, builder = _loaded(path, name, split, streaming, options)
    features = data.features or {}
    if features and (missing := [column for column in columns if column not in features]):
        raise UsageError(f"columns: {path} has no `{missing[0]}`", hints=[f"it has {', '.join(features)}"])
    number = classes or next((one.num_classes for one in features.values() if hasattr(one, "num_classes")), None)
    found = [features[column].names for column in columns if hasattr(features.get(column), "num_classes")]
    names = list(found[0]) if len(found) == 1 else []
    if not streaming:
        _check_nulls(data, columns)
        return HuggingFaceRows(data.select_columns(list(columns)), columns, number, names)
    lengths = _lengths(shard_lengths, data.num_shards) if shard_lengths else None
    if lengths is None:
        data, lengths = _in_parts(data, builder, split, index)
    data = data.select_columns(list(columns)) if features else data
    if lengths is None:
        return Streamed(data, columns, number, names)
    return HuggingFaceShards(data, columns, number, names, lengths, shuffle, shuffle_buffer, interleave)


def _check_nulls(data: Any, columns: Sequence[str]) -> None:
    """Raises UsageError for a row without a value in a column; arrow counts them without reading the values."""
    for column in columns:
        if empty := data.data.column(column).null_count:
            row = next(number for number, value in enumerate(data.with_format(None)[column]) if value is None)
            raise UsageError(
                f"columns: row {row + 1} has no value (null) in `{column}`, and so have {empty} of {len(data):,} rows",
                hints=["fill them in, or remove the rows"],
                key="columns",
            )


def _loaded(path: str, name: str | None, split: str, streaming: bool, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the dataset and, for a stream, its builder; raises SetupError if it cannot be loaded."""
    if path in _PICKLED:
        raise UsageError(
            f'path: "{path}" reads pickles, which may run code', hints=["write parquet: pandas.DataFrame.to_parquet"]
        )
    if path.startswith((".", "/", "~")) and not Path(path).exists():  # it would be looked up on the hub, for minutes
        raise SetupError(f"path: there is no file or folder {path}", hints=not_there(path))
    datasets = library("datasets", "datasets")
    if not (Path(path).exists() or options.get("data_files") or path in (*_FORMATS, *_BUILDERS)):
        _check_hub(path, Path(datasets.config.HF_DATASETS_CACHE))
    try:
        if not streaming:
            return datasets.load_dataset(path, name, split=split, **options), None
        builder = datasets.load_dataset_builder(path, name, **options)
        return builder.as_streaming_dataset(split=split), builder
    except StopIteration as error:  # of the first file without a row
        raise UsageError(
            f"data_files: {options.get('data_files', path)} has no rows", hints=["the file is empty"], key="data_files"
        ) from error
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        if isinstance(error, ValueError) and (known := re.search(_SPLITS, str(error))):
            hints = [f"it has {known[1]}"] if known[1] else ['expected e.g. "train", "train[:90%]" or "train[-100:]"']
            reason = "" if known[1] else f": {error}"
            raise UsageError(f'split: {path} has no split "{split}"{reason}', hints=hints, key="split") from error
        cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        message = f"path: {path} cannot be loaded: {type(cause or error).__name__}: {cause or error}"
        raise SetupError(message, hints=list(_ways(path, options.get("data_files")))) from error


def _check_hub(path: str, cache: Path) -> None:
    """Raises SetupError if a name on the hub is not in the cache of datasets, and the hub does not answer."""
    if (cache / path.replace("/", "___")).is_dir() or not (fault := hub_fault()):
        return
    hints = [f"`{path}` is not a folder in {Path.cwd()}, and not in the cache of datasets either: {cache}"]
    raise SetupError(f"path: {path} cannot be loaded: {fault}", hints=hints)


@cache
def hub_fault() -> str:
    """Returns why the hub of Hugging Face cannot be reached; "" if it answers, or if HF_HUB_OFFLINE is set.

    One request of at most five seconds. The libraries of the hub would try again for half a minute with every file.
    """
    import huggingface_hub.constants as hub

    if hub.HF_HUB_OFFLINE:
        return ""
    try:
        urlopen(Request(hub.ENDPOINT, method="HEAD"), timeout=_PATIENCE).close()
    except HTTPError:
        return ""  # an answer
    except OSError as error:
        reason = getattr(error, "reason", error)
        return "" if isinstance(reason, SSLError) else f"{hub.ENDPOINT} cannot be reached ({reason})"
    return ""


def _ways(path: str, files: Any) -> Iterator[str]:
    """Yields ways to mend a `path` that cannot be loaded, or its `data_files`."""
    kind = {"jsonl": "json", "txt": "text"}.get(suffix := Path(path).suffix[1:], suffix)
    named = [files] if isinstance(files, str) else files or []
    if Path(path).is_file():
        yield f'for files, write path = "{kind}" and data_files = "{path}"'
    elif hints := unexpanded(path):
        yield from hints
    elif missing := next((one for one in named if not Path(one).exists() and "*" not in one and ":" not in one), None):
        yield from (f"data_files: {hint}" for hint in not_there(missing))
    elif path in _FORMATS:
        yield f'for files, write path = "{_FORMATS[path]}"'
    elif not Path(path).exists() and path not in _BUILDERS:
        yield f"it is not a folder in {Path.cwd()}, so it was looked up by name on the hub"


def load_split(path: str, split: str | None) -> Any:
    """Returns the rows of a split, for datasets that read whole rows: of a name on the hub, or of `save_to_disk`.

    Raises:
        SetupError: The dataset cannot be loaded.
        UsageError: The folder has several splits, and `split` is None.
    """
    if not Path(path).is_dir():
        return _loaded(path, None, split or "train", False, {})[0]
    datasets = library("datasets", "datasets")
    saved = any((Path(path) / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if not saved:
        return _loaded(path, None, split or "train", False, {})[0]
    try:
        found = datasets.load_from_disk(path)
    except (OSError, ValueError) as error:
        raise SetupError(f"{path} cannot be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, dict):
        if split not in (None, "train"):
            raise UsageError(f"split: {path} is one split, which was saved alone", hints=["remove `split`"])
        return found
    if split not in found:
        raise UsageError(f"split: {path} has no split {split}", hints=[f"it has {', '.join(found)}"])
    return found[split]


class _Tuples:
    """Base class of datasets with tuples of the chosen columns as samples."""

    random = False

    def __init__(self, data: Any, columns: Sequence[str], classes: int | None, class_names: Sequence[str] = ()) -> None:
        self._data, self._columns, self.class_names = data, list(columns), list(class_names)
        if classes is not None:
            self.classes = classes

    def collate(self, samples: list[Mapping[str, Any]]) -> Any:
        """Makes a batch; numbers become tensors."""
        from torch.utils.data import default_collate

        rows = [tuple(numeric(row[column]) for column in self._columns) for row in samples]
        for column, values in zip(self._columns, zip(*rows, strict=True), strict=True):
            _check_shapes(column, values)
        return default_collate(rows)


class HuggingFaceRows(_Tuples):
    """Memory-mapped dataset on disk."""

    forkable = True

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._data[index]
        return row

    def __getitems__(self, ids: list[int]) -> list[Mapping[str, Any]]:
        """Reads these rows together."""
        found = self._data[ids]
        return [
            dict(zip(self._columns, row, strict=True)) for row in zip(*(found[c] for c in self._columns), strict=True)
        ]

    def __getattr__(self, name: str) -> Any:
        """Returns a column as an array of one value per sample, for orders."""
        import numpy as np

        if name.startswith("_") or name not in self._columns:
            raise AttributeError(name)
        return np.array(self._data[name])


class Streamed(_Tuples):
    """Stream of unknown length: every rank reads it, and ddpforge distributes the samples."""

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(self._data)


class HuggingFaceShards(_Tuples, ShardedDataset):
    """Stream in shards of known length."""

    seekable = False

    def __init__(
        self,
        data: Any,
        columns: Sequence[str],
        classes: int | None,
        class_names: Sequence[str],
        parts: Sequence[int],
        shuffle: bool,
        shuffle_buffer: int,
        interleave: tuple[int, int],
    ) -> None:
        super().__init__(data, columns, classes, class_names)
        self.shard_sizes, self.shuffle, self.shuffle_buffer, self.interleave = (
            parts,
            shuffle,
            shuffle_buffer,
            interleave,
        )

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[Mapping[str, Any]]:
        """Yields the rows of a shard; `datasets` reads and drops skipped rows."""
        return iter(self._data.shard(len(self.shard_sizes), part).skip(skip))


def _check_shapes(column: str, values: Sequence[Any]) -> None:
    """Raises UsageError if arrays have different shapes and cannot form a batch."""
    import numpy as np

    shapes = {value.shape: None for value in values if isinstance(value, np.ndarray)}
    if len(shapes) > 1:
        one, other, *_ = (list(shape) for shape in shapes)
        raise UsageError(
            f"columns: rows have different shapes in `{column}`: {one} and {other}",
            hints=["cut or pad them to one length before training, or write a dataset with a `collate` that pads"],
        )


def _in_parts(data: Any, builder: Any, split: str, index: str | None) -> tuple[Any, list[int] | None]:
    """Returns the stream in as many shards as possible, and their lengths; None if it must be read as a whole."""
    files = _files(builder, split)
    parquet = library("datasets.packaged_modules.parquet.parquet", "datasets").Parquet
    if files and isinstance(builder, parquet) and builder.config.filters is None:
        return data.reshard(), _measured(files, builder, index, _row_groups)
    if data.num_shards == 1 or data.num_shards != len(files):
        why = "it does not consist of several files that can be read separately"
    elif index is None:
        why = f"set `index` to a folder, to count the rows of its {len(files)} files once"
    else:
        in_tables = isinstance(builder, library("datasets", "datasets").ArrowBasedBuilder)
        return data, _measured(files, builder, index, partial(_rows, data, in_tables))
    log.info("%s (%s) is read completely by every rank and loader process: %s", builder.dataset_name, split, why)
    return data, None


def _files(builder: Any, split: str) -> list[tuple[str, Any]]:
    """Returns the files of a split in the order of its shards, each with a version that changes with its content."""
    found: list[tuple[str, Any]] = []
    known = builder.config.data_files or {}
    for name in known if split == "all" else split.split("+"):
        files = known.get(name.strip(), [])
        versions = getattr(files, "origin_metadata", [])
        if len(versions) != len(files):  # versions of other files are included
            every = any(versions) and library("datasets.fingerprint", "datasets").Hasher.hash(versions)
            versions = [every] * len(files)
        found += zip(files, versions, strict=True)
    return found


def _measured(
    files: Sequence[tuple[str, Any]], builder: Any, index: str | None, find: Callable[[int, str], NDArray[np.int64]]
) -> list[int]:
    """Returns the lengths of all parts, file by file."""
    options = {key: value for key, value in vars(builder.config).items() if key != "data_files"}
    found: dict[int, NDArray[np.int64]] = {}
    for number in random.SystemRandom().sample(range(len(files)), len(files)):  # ranks with one index share the work
        file, version = files[number]
        facts = [type(builder).__name__, options, file, version]
        found[number] = keep(index if version else None, Path(file).stem, facts, partial(find, number, file))
    return [int(rows) for number in range(len(files)) for rows in found[number]]


def _row_groups(number: int, file: str) -> NDArray[np.int64]:
    """Reads the number of rows of each row group of a file from its footer."""
    import numpy as np

    with library("fsspec", "datasets").open(file) as opened:
        footer = library("pyarrow.parquet", "datasets").ParquetFile(opened).metadata
    return np.array([footer.row_group(group).num_rows for group in range(footer.num_row_groups)], dtype=np.int64)


def _rows(data: Any, in_tables: bool, number: int, file: str) -> NDArray[np.int64]:
    """Counts the rows of a file, without decoding them."""
    import numpy as np

    shard = data.shard(data.num_shards, number)
    try:
        if in_tables:
            return np.array([sum(map(len, shard.with_format("arrow").iter(1000)))])
        return np.array([sum(1 for _ in (shard.decode(False) if shard.features else shard))])
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        raise SetupError(f"{file} cannot be read: {error}") from error


def _lengths(path: Path, shards: int) -> list[int]:
    if not path.is_file():
        raise SetupError(f"shard_lengths: no such file: {path}", hints=not_there(path))
    try:
        lengths = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except ValueError as error:
        raise UsageError(f"shard_lengths: {path} must contain one number per line: {error}") from error
    if len(lengths) != shards:
        raise UsageError(f"shard_lengths: {path} has {len(lengths)} numbers, but the dataset has {shards} shards")
    return lengths
