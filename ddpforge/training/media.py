"""Converts the values that callbacks and tasks show into the form that trackers take."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ddpforge.errors import PluginError
from ddpforge.interfaces import Histogram, MediaKind, Table, Tracker

__all__ = ["MediaLogger"]

log = logging.getLogger("ddpforge")

_NAME = re.compile(r"(?!.*(^|/)\.)[\w.-]+(/[\w.-]+)*", re.ASCII)
_BINS = 64
_GAP = 2  # pixels between the images of a grid
_LARGEST = {"name": 200, "pixels": 4096, "text": 1_000_000, "rows": 10_000, "columns": 100}
_FORMS = {
    "image": "a tensor or array [height, width], [1 or 3, height, width] or [N, 1 or 3, height, width]",
    "histogram": "a tensor, array or sequence of numbers, or a Histogram",
    "text": "a string",
    "table": "a list of mappings with the same columns",
}


class _Odd(ValueError):
    """Raised for numbers of the right form that cannot be shown."""


class MediaLogger:
    """Passes shown values to a tracker, with the current `step`; only the main rank does so.

    See `interfaces.LogMedia` for the values that are accepted.
    """

    def __init__(self, tracker: Tracker, *, is_rank_zero: bool) -> None:
        self.step = 0
        self._tracker, self._is_rank_zero = tracker, is_rank_zero
        self._warned: set[str] = set()

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Shows nothing inside."""
        tracker, self._tracker = self._tracker, Tracker()
        try:
            yield
        finally:
            self._tracker = tracker

    def __deepcopy__(self, _: dict[int, Any]) -> MediaLogger:
        """Returns an instance that shows nothing: a copied task is only tried out, and trackers cannot be copied."""
        return MediaLogger(Tracker(), is_rank_zero=False)

    def __call__(self, name: str, value: Any, kind: MediaKind) -> None:
        """Shows `value`; raises PluginError for a wrong name, kind or form."""
        if not self._is_rank_zero:
            return
        if kind not in get_args(MediaKind):
            _reject(name, f"kind {kind!r}", f"one of {', '.join(get_args(MediaKind))}")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _LARGEST["name"]:
            _reject(name, "this name", "words of letters, digits, `.`, `_` and `-`, with `/` between them")
        try:
            plain = _PLAIN[kind](name, value)
        except _Odd as error:
            if name not in self._warned:
                log.warning("step %d: %s `%s` is not shown: %s", self.step, kind, name, error)
                self._warned.add(name)
            return
        self._tracker.log_media(self.step, name, plain, kind)


def _reject(name: str, found: str, expected: str) -> NoReturn:
    raise PluginError(f"cannot show `{name}`: {found}", hints=[f"expected {expected}"])


def _array(name: str, value: Any, kind: str) -> NDArray[Any]:
    """Returns the numbers of `value` on the host; floats as float32 or float64."""
    plain = value
    if isinstance(value, Tensor):
        small = value.is_floating_point() and value.dtype.itemsize < 4  # numpy has no bfloat16
        plain = (value.detach().float() if small else value.detach()).cpu().numpy()
    try:
        found = np.asarray(plain)
    except (ValueError, TypeError, RuntimeError):  # e.g. a list of tensors that require gradients
        found = np.asarray(None)
    if found.dtype.kind not in "biuf":
        _reject(name, f"a {type(value).__name__} of {found.dtype}", _FORMS[kind])
    return found


# ---------------------------------------------------------------------------------------------- by kind
def _image(name: str, value: Any) -> NDArray[np.uint8]:
    """Returns uint8 [height, width, 3]; several images become a grid."""
    found = _array(name, value, "image")
    images = found[(None,) * max(0, 4 - found.ndim)] if found.ndim in (2, 3) else found
    if images.ndim != 4 or images.shape[1] not in (1, 3) or not images.size:
        _reject(name, f"an image of shape {list(found.shape)}", _FORMS["image"])
    grid = _grid(_bytes(images))
    if max(grid.shape) > _LARGEST["pixels"]:
        _reject(name, f"an image of {grid.shape[1]} × {grid.shape[0]} pixels", f"at most {_LARGEST['pixels']} each way")
    return grid


def _bytes(images: NDArray[Any]) -> NDArray[np.uint8]:
    """Returns the pixels as uint8; raises _Odd for floats outside of 0 to 1, and integers outside of 0 to 255."""
    least, most = images.min(), images.max()
    if images.dtype == np.uint8:
        return images
    if images.dtype == np.bool_:
        return images * np.uint8(255)
    if images.dtype.kind == "f":
        if not (least >= 0 and most <= 1):
            raise _Odd(f"its values go from {least:.4g} to {most:.4g}; scale or clamp floats to 0 to 1")
        return np.asarray(np.rint(images * 255), np.uint8)
    if not (least >= 0 and most <= 255):
        raise _Odd(f"its values go from {least} to {most}; integers go from 0 to 255, floats from 0 to 1")
    return images.astype(np.uint8)


def _grid(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Arranges images [N, channels, height, width] in rows, as nearly in a square as possible."""
    number, channels, height, width = images.shape
    columns = math.ceil(math.sqrt(number))
    rows = math.ceil(number / columns)
    grid = np.zeros((rows * (height + _GAP) - _GAP, columns * (width + _GAP) - _GAP, channels), np.uint8)
    for index, image in enumerate(images):
        top, left = index // columns * (height + _GAP), index % columns * (width + _GAP)
        grid[top : top + height, left : left + width] = image.transpose(1, 2, 0)
    return np.repeat(grid, 3, axis=2) if channels == 1 else grid


def _histogram(name: str, value: Any) -> Histogram:
    if isinstance(value, Histogram):
        if len(value.edges) != len(value.counts) + 1 or not np.isfinite(value.edges).all():
            form = f"a Histogram of {len(value.counts)} counts and {len(value.edges)} edges"
            _reject(name, form, "one finite edge more than counts")
        return value
    found = _array(name, value, "histogram").ravel().astype(np.float64)
    finite = found[np.isfinite(found)]
    try:
        counts, edges = np.histogram(finite, _BINS)
    except ValueError as error:  # a range too narrow, or too wide, for bins in float64
        raise _Odd(f"its values go from {finite.min()} to {finite.max()}: {error}") from error
    return Histogram(tuple(counts.tolist()), tuple(edges.tolist()), found.size - finite.size)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        _reject(name, f"a {type(value).__name__}", _FORMS["text"])
    if len(value) > _LARGEST["text"]:
        _reject(name, f"text of {len(value):,} characters", f"at most {_LARGEST['text']:,}")
    return value.encode(errors="replace").decode()  # half a surrogate pair cannot be written


def _table(name: str, value: Any) -> Table:
    if not isinstance(value, Sequence) or isinstance(value, str):
        _reject(name, f"a {type(value).__name__}", _FORMS["table"])
    rows = list(value)
    if not rows:
        raise _Odd("it has no rows")
    if not all(isinstance(row, Mapping) and row.keys() == rows[0].keys() for row in rows):
        _reject(name, f"a {type(value).__name__}", _FORMS["table"])
    if len(rows) > _LARGEST["rows"] or len(rows[0]) > _LARGEST["columns"]:
        limits = f"at most {_LARGEST['rows']:,} rows of {_LARGEST['columns']} columns"
        _reject(name, f"a table of {len(rows):,} rows of {len(rows[0])} columns", limits)
    return [{str(column): _cell(name, row[column]) for column in rows[0]} for row in rows]


def _cell(name: str, value: Any) -> str | int | float | bool | None:
    if isinstance(value, Tensor | np.generic) and not getattr(value, "ndim", 0):
        value = value.item()
    if value is not None and not isinstance(value, str | int | float | bool):
        _reject(name, f"a {type(value).__name__} in a cell", "numbers, strings, true, false or None")
    return value


_PLAIN: dict[str, Callable[[str, Any], Any]] = {
    "image": _image,
    "histogram": _histogram,
    "text": _text,
    "table": _table,
}
