"""Rows of data about language: JSON lines, JSON arrays, parquet files, and datasets of Hugging Face."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

from ddpforge.builtin.datasets.hugging_face import load_split
from ddpforge.builtin.datasets.listing import other_kind
from ddpforge.errors import UsageError, library, not_there
from pydantic import Field

__all__ = ["Invalid", "OnInvalid", "Row", "Split", "check_characters", "is_dataset", "not_text", "read_rows"]

Row = dict[str, Any]
OnInvalid = Annotated[
    Literal["error", "drop"],
    Field(description='Invalid lines: "error" refuses the data, "drop" leaves them out and logs how many, by reason.'),
]
Split = Annotated[
    str | None,
    Field(description='Split of a dataset of Hugging Face, e.g. "train[:90%]"; `path` is its name or folder.'),
]
_HALF = re.compile("[\ud800-\udfff]")
_OVER_LINES = "; write each object in one line, or an array in a file with the ending .json"
_SHOWN = 8  # reasons


def is_dataset(path: Path, split: str | None) -> bool:
    """Returns whether a path is a dataset of Hugging Face: a name on the hub, or a folder of `save_to_disk`.

    Raises UsageError for a file with a split.
    """
    if split is not None and path.is_file():
        raise UsageError(f"split: {path} is a file, which has no splits", hints=["remove `split`"], key="split")
    return split is not None or any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))


def read_rows(path: Path, files: list[Path], split: str | None = None) -> Iterator[tuple[str, Row | ValueError]]:
    """Yields the place, e.g. "FILE, line N", and the row, or the error of a row that cannot be read.

    Raises ValueError for files that cannot be read or have no rows; SetupError for a dataset that cannot be loaded.
    """
    if is_dataset(path, split):
        yield from _of_dataset(path, split)
    for file in files:
        rows = 0
        for one in _of_parquet(file) if file.suffix == ".parquet" else _of_json(file):
            rows += 1
            yield one
        if not rows:
            raise ValueError(f"{file} is empty: expected one JSON object per line")


def _of_json(file: Path) -> Iterator[tuple[str, Row | ValueError]]:
    try:
        with file.open(encoding="utf-8-sig") as opened:
            if file.suffix == ".json" and opened.read(4096).lstrip().startswith("["):
                opened.seek(0)
                yield from _of_array(file, opened.read())
                return
            opened.seek(0)
            for number, line in enumerate(opened, 1):
                if line.strip():
                    where = f"{file}, line {number}"
                    yield where, _object(line, where, "; a JSON array is read from a file with the ending .json")
    except UnicodeDecodeError as error:
        raise not_text(file, error) from error
    except OSError as error:
        found = not_text(file, error)
        found.hints += ("for a dataset on the hub set `split`",) if not file.exists() else ()
        raise found from error


def not_text(file: Path, error: Exception) -> UsageError:
    """Returns the error for a file that cannot be read as UTF-8, with its kind if it is known."""
    if not file.is_file():
        return UsageError(f"path: there is no file {file}", hints=not_there(file), key="path")
    if found := other_kind(file.read_bytes()[:16]):
        return UsageError(f"path: {file} {found[0]}, not text in UTF-8", hints=[found[1]], key="path")
    return UsageError(f"path: {file} cannot be read as UTF-8 text: {error}", hints=["write it as UTF-8"], key="path")


def _of_array(file: Path, text: str) -> Iterator[tuple[str, Row | ValueError]]:
    try:
        rows = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{file} begins as a JSON array, but is not JSON: {error}") from error
    for number, row in enumerate(rows, 1):
        where = f"{file}, row {number}"
        yield where, _checked(row, where, "expected an array of JSON objects")


def _object(line: str, where: str, hint: str) -> Row | ValueError:
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        return ValueError(f"{where} is not JSON: {error}{_OVER_LINES if line.strip() in ('[', '{') else ''}")
    return _checked(row, where, f"expected one JSON object per line{hint if isinstance(row, list) else ''}")


def _checked(row: Any, where: str, expected: str) -> Row | ValueError:
    if not isinstance(row, dict):
        names = {list: "a list", str: "a text", bool: "true or false", type(None): "null or absent"}
        return ValueError(f"{where} is {names.get(type(row), 'a number')}: {expected}")
    try:
        check_characters(row, where)
    except ValueError as error:
        return error
    return row


def _of_parquet(file: Path) -> Iterator[tuple[str, Row | ValueError]]:
    numbers = count(1)
    try:
        with library("pyarrow.parquet", "parquet").ParquetFile(file) as opened:
            for batch in opened.iter_batches(1000):
                for row in batch.to_pylist():
                    where = f"{file}, row {next(numbers)}"
                    yield where, _checked(_without_nulls(row), where, "expected an object")
    except (OSError, ValueError) as error:  # pyarrow's errors are ValueErrors
        if str(file) in str(error).split(", row ")[0] and ", row " in str(error):
            raise
        raise ValueError(f"{file} is not a parquet file: {error}") from error


def _of_dataset(path: Path, split: str | None) -> Iterator[tuple[str, Row | ValueError]]:
    data = _with_content(load_split(str(path), split))
    for number in range(len(data)):
        where = f"{path}, row {number + 1}"
        yield where, _checked(_without_nulls(data[number]), where, "expected an object")


def _with_content(data: Any) -> Any:
    """Returns a dataset whose images are {bytes, path}, not decoded."""
    from datasets import Image  # type: ignore[import-untyped]

    for name, feature in data.features.items():
        inner = getattr(feature, "feature", None)  # of a list
        if isinstance(feature, Image):
            data = data.cast_column(name, Image(decode=False))
        elif isinstance(inner, Image):
            data = data.cast_column(name, type(feature)(Image(decode=False)))
    return data


def _without_nulls(value: Any) -> Any:
    """Returns a value of arrow without nulls in objects: all objects of a column have the same keys there."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list) else value


def check_characters(value: Any, where: str, key: str = "") -> None:
    """Raises ValueError for a text with half of a character (a surrogate), which no tokenizer takes."""
    if isinstance(value, str):
        if found := _HALF.search(value):
            raise ValueError(
                f"{where}{f': {key}' if key else ''} has half of a character, \\u{ord(found[0]):04x}, as in an emoji"
                " that was cut; remove it, or write the whole character"
            )
    elif isinstance(value, dict):
        for name, one in value.items():
            check_characters(str(name), where, key)
            check_characters(one, where, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list):
        for number, one in enumerate(value):
            check_characters(one, where, f"{key}[{number}]")


class Invalid:
    """Invalid rows: raises the error of the first, or counts them by reason."""

    def __init__(self, on_invalid: str) -> None:
        self._drop = on_invalid == "drop"
        self._reasons: Counter[str] = Counter()
        self._examples: dict[str, str] = {}

    @property
    def number(self) -> int:
        """Number of the rows that were left out."""
        return self._reasons.total()

    def take(self, where: str, error: ValueError) -> None:
        """Notes an invalid row; raises its error if such rows are not left out."""
        text = str(error) if str(error).startswith(where) else f"{where}: {error}"
        if not self._drop:
            raise ValueError(text) from error
        reason = re.sub(r"\d+", "N", text.removeprefix(where).lstrip(":,; "))[:200]
        self._reasons[reason] += 1
        self._examples.setdefault(reason, where)

    def reasons(self) -> str:
        """Returns the reasons with their counts, the most frequent first, each with an example."""
        shown = [f"{n} x {reason} (e.g. {self._examples[reason]})" for reason, n in self._reasons.most_common(_SHOWN)]
        more = len(self._reasons) - len(shown)
        return "; ".join(shown) + (f"; and {more} further reasons" if more > 0 else "")
