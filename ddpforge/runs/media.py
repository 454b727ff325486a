"""Writes the images, texts, tables and histograms of a run to its folder: `shown/NAME/step-000000120.png`."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddpforge import disk
from ddpforge.errors import SetupError
from ddpforge.interfaces import MediaKind, Tracker

__all__ = ["FOLDER", "MediaFiles", "step_of"]

FOLDER = "shown"
_SUFFIXES = {"image": ".png", "histogram": ".json", "text": ".txt", "table": ".json"}
_STEP = re.compile(r"step-([0-9]{1,18})\.(png|json|txt)")
_BLOCK = 4096  # smallest size of a file on disk, in bytes


class MediaFiles(Tracker):
    """Writes images as PNG, histograms and tables as JSON, and text unchanged. Each file is written atomically.

    All files together take at most `most` bytes: the files of the oldest steps are removed first. When training
    returns to an earlier step, the files of later steps are removed.
    """

    def __init__(self, most: int = 256 << 20) -> None:
        self._most = most

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Continues with the files of earlier attempts, without those after `resumed_at`."""
        self._run, self._folder = folder, folder / FOLDER
        with _writing(self._folder):
            disk.reject_linked_folders(self._folder, folder)
        found = ((path, _STEP.fullmatch(path.name)) for path in self._folder.rglob("step-*"))
        self._files = {path: (int(match[1]), _size(path)) for path, match in found if match and disk.is_plain(path)}
        self.rewind(-1 if resumed_at is None else resumed_at)

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        """Writes one file."""
        path = self._folder / name / f"step-{step:09}{_SUFFIXES[kind]}"
        disk.reject_linked_folders(path.parent, self._run)
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.replace(path, encoded(value, kind), waits=False)  # this may happen in every step: no fsync
        self._files[path] = (step, _size(path))
        taken = sum(size for _, size in self._files.values())
        for path in sorted(self._files, key=lambda path: self._files[path][0]):
            if taken <= self._most:
                break
            taken -= self._files[path][1]
            self._remove(path)

    def rewind(self, step: int) -> None:
        """Removes the files of later steps."""
        for path in [path for path, (when, _) in self._files.items() if when > step]:
            self._remove(path)

    def _remove(self, path: Path) -> None:
        disk.remove(path)
        del self._files[path]


def step_of(path: Path) -> int | None:
    """Returns the step in the name of a shown file; None for any other file."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def _size(path: Path) -> int:
    return -(-path.lstat().st_size // _BLOCK) * _BLOCK


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(f"{path} cannot be written: {error.strerror or error}") from error


def encoded(value: Any, kind: MediaKind) -> bytes:
    """Returns the bytes of a shown file. NaN and infinities are null, because JSON has none."""
    if kind == "image":
        return png(value)
    if kind == "text":
        return str(value).encode()
    plain = asdict(value) if kind == "histogram" else [{key: _finite(x) for key, x in row.items()} for row in value]
    return json.dumps(plain, allow_nan=False).encode()


def png(image: Any) -> bytes:
    """Returns an image, uint8 [height, width, 3], as the bytes of a PNG file."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
