"""Columns for samplers: one value per sample, from the dataset or from a file."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpforge.errors import SetupError, UsageError, not_there

__all__ = ["column", "numbers"]

_FILES = (".npy", ".txt", ".csv")


def column(data: Any, by: str, *, option: str = "by") -> NDArray[Any]:
    """Reads one value per sample: from the attribute or method `by` of `data`, or from the file `by`.

    Errors name the `option` of the recipe that has the value `by`.

    Raises:
        UsageError: `data` has no such attribute, or the values do not fit the data.
        SetupError: The file does not exist.
    """
    values = np.asarray(_file(Path(by), option) if by.endswith(_FILES) else _attribute(data, by, option))
    if values.ndim != 1 or values.dtype.kind not in "biufUS":
        raise UsageError(f"{option}: `{by}` must contain one number or string per sample, not {_form(values)}")
    if len(values) != len(data):
        raise UsageError(
            f"{option}: `{by}` has {len(values)} values, but {type(data).__name__} has {len(data)} samples"
        )
    return values


def numbers(data: Any, by: str, *, least: float = -inf, option: str = "by") -> NDArray[np.float64]:
    """Reads a column as `column` does; raises UsageError unless all values are finite and at least `least`."""
    values = column(data, by, option=option)
    if values.dtype.kind in "US":
        raise UsageError(f"{option}: `{by}` must contain numbers, not strings")
    found = values.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(found) | (found < least))
    if bad.size:
        limit = "" if least == -np.inf else f" of at least {least:g}"
        raise UsageError(f"{option}: `{by}` must contain finite numbers{limit}; sample {bad[0]} has {found[bad[0]]:g}")
    return found


def _attribute(data: Any, by: str, option: str) -> Any:
    found = getattr(data, by, None)
    if found is None:
        raise UsageError(
            f"{option}: {type(data).__name__} has no attribute or method `{by}`",
            hints=[
                f"give the dataset an attribute or a method `{by}`: an array with one value per sample",
                f'or name a file with one value per sample: {option} = "values.npy"; or .txt or .csv, one per line',
            ],
        )
    return found() if callable(found) else found


def _file(path: Path, option: str) -> NDArray[Any]:
    if not path.is_file():
        raise SetupError(f"{option}: there is no file {path}", hints=not_there(path))
    try:
        if path.suffix == ".npy":
            return np.asarray(np.load(path, allow_pickle=False))
        lines = [line.strip() for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        try:
            return np.array(lines, dtype=np.float64)
        except ValueError:
            return np.array(lines)
    except (OSError, ValueError) as error:
        raise UsageError(f"{option}: {path} cannot be read: {error}") from error


def _form(values: NDArray[Any]) -> str:
    return "objects" if values.dtype.kind == "O" else f"an array of shape {list(values.shape)} of {values.dtype}"
