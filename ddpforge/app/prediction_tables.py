"""Tables of predictions, written row by row as JSON lines or parquet. A file appears complete or not at all."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from ddpforge import disk
from ddpforge.disk import appearing
from ddpforge.errors import PluginError, UsageError, library, require

__all__ = ["TableWriter", "check_table", "writing"]

Columns = Mapping[str, NDArray[Any] | Sequence[Any]]

_ROWS = 1 << 14  # minimum rows of a parquet row group


class TableWriter(ABC):
    """Table that is being written; all columns of one `add` have the same number of rows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    @abstractmethod
    def add(self, columns: Columns) -> None:
        """Appends rows; raises PluginError for values that the format cannot represent."""

    def end(self) -> None:
        """Writes the remaining rows."""


def check_table(out: Path) -> None:
    """Raises UsageError if the file suffix is of no known format, PluginError if the format's library is missing."""
    if out.suffix not in _FORMATS:
        raise UsageError(
            f"{out}: the suffix of the file selects the format, and must be {' or '.join(_FORMATS)}",
            hints=[f"-o {out.with_suffix('.jsonl')}"],
        )
    if out.suffix == ".parquet":
        require("pyarrow", "parquet")


@contextmanager
def writing(out: Path) -> Iterator[TableWriter]:
    """Yields a table to fill; the file `out` appears if no error occurred.

    Raises SetupError if the file cannot be written.
    """
    with appearing(out) as temporary, disk.create(temporary) as file:
        table = _FORMATS[out.suffix](file)
        yield table
        table.end()
        disk.sync(file)


# ---------------------------------------------------------------------------------------------- JSON lines
class _Lines(TableWriter):
    """One JSON object per row. JSON has no NaN: a number that is not finite becomes null."""

    def add(self, columns: Columns) -> None:
        plain = {name: _jsonable(column) for name, column in columns.items()}
        try:
            rows = zip(*plain.values(), strict=True)
            lines = [json.dumps(dict(zip(plain, row, strict=True)), ensure_ascii=False) for row in rows]
        except TypeError as error:
            hint = "predictions must be tensors, numbers or strings"
            raise PluginError(f"JSON cannot represent a prediction: {error}", hints=[hint]) from error
        disk.write(self._file, "".join(f"{line}\n" for line in lines).encode())


def _jsonable(value: Any) -> Any:
    """Returns the value with lists for arrays, and numbers with the fewest digits that are exact in their dtype."""
    if isinstance(value, np.ndarray | np.generic):
        short = value.dtype.kind == "f" and value.dtype.itemsize < 8
        found: Any = (value.astype(str).astype(np.float64) if short else value).tolist()
        return found if value.dtype.kind != "f" or np.isfinite(value).all() else _jsonable(found)
    if isinstance(value, Mapping):
        return {name: _jsonable(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(one) for one in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


# ---------------------------------------------------------------------------------------------- parquet
class _Parquet(TableWriter):
    """Parquet file with typed columns. The first rows fix the types; tensors become nested lists."""

    def __init__(self, file: BinaryIO) -> None:
        super().__init__(file)
        self._schema: Any = None
        self._writer: Any = None
        self._waiting: list[Any] = []  # tables, until they fill a row group

    def add(self, columns: Columns) -> None:
        pa, known = _pyarrow(), {}
        if self._schema is not None:
            known = dict(zip(self._schema.names, self._schema.types, strict=True))
        try:
            types = {name: known[name] if known else _type(column) for name, column in columns.items()}
            arrays = {name: pa.array(_cells(column), types[name]) for name, column in columns.items()}
            table = pa.table(arrays, schema=self._schema)
        except (pa.ArrowException, KeyError, ValueError, TypeError) as error:
            raise PluginError(
                f"parquet cannot represent a prediction: {error}",
                hints=["every batch must have the same columns, of the same types"],
            ) from error
        self._schema = table.schema
        self._waiting.append(table)
        if sum(map(len, self._waiting)) >= _ROWS:
            self._write()

    def end(self) -> None:
        self._write()
        if self._writer is not None:
            self._writer.close()

    def _write(self) -> None:
        if not self._waiting:
            return
        if self._writer is None:
            self._writer = library("pyarrow.parquet", "parquet").ParquetWriter(self._file, self._schema)
        self._writer.write_table(_pyarrow().concat_tables(self._waiting))
        self._waiting.clear()
        disk.proceed()


def _pyarrow() -> Any:
    return library("pyarrow", "parquet")


def _type(column: NDArray[Any] | Sequence[Any]) -> Any:
    """Returns the type of the cells if they are arrays; None otherwise: pyarrow then infers it."""
    cells = column if isinstance(column, np.ndarray) else next((one for one in column), None)
    if not isinstance(cells, np.ndarray):
        return None
    pa = _pyarrow()
    found = pa.from_numpy_dtype(cells.dtype)
    for _ in range(cells.ndim - isinstance(column, np.ndarray)):
        found = pa.list_(found)
    return found


def _cells(column: NDArray[Any] | Sequence[Any]) -> Any:
    if isinstance(column, np.ndarray):
        return column if column.ndim == 1 else column.tolist()
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in column]


_FORMATS: Mapping[str, type[TableWriter]] = {".jsonl": _Lines, ".parquet": _Parquet}
