"""Changes files of checkpoints while a training is stopped: bits, lengths, and pickles that run code."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from museum.training import SEEN

__all__ = ["RAN", "cut_weights", "flip_a_bit", "hide_code"]

RAN = [666.0]
"""Record in `SEEN` of code that a checkpoint ran."""
_ONES = struct.pack("<f", 1.0) * 16


def flip_a_bit(folder: Path) -> None:
    """Flips one bit of a weight of 1.0 in each file that has such weights: they become 0.5."""
    if not list(map(_flip, _with_ones(folder))):
        raise RuntimeError("no file has the weights")


def cut_weights(folder: Path) -> None:
    """Cuts the last quarter of each file that has the weights."""
    for path in list(_with_ones(folder)):
        os.truncate(path, path.stat().st_size * 3 // 4)


def hide_code(folder: Path) -> None:
    """Replaces what the pickles of a checkpoint hold by objects that run code and then are what they were."""
    for path in _files(folder):
        if path.read_bytes()[:2] != b"PK":  # not a file of torch.save
            continue
        new = path.with_suffix(".new")
        torch.save(_Hidden(torch.load(path, weights_only=False)), new)
        new.rename(path)


class _Hidden:
    """Object that runs a function while it is unpickled."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __reduce__(self) -> Any:
        return _run, (self.kept,)


def _run(kept: Any) -> Any:
    SEEN.append(RAN)
    return kept


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix not in (".txt", ".json", ".jsonl", ".toml"):
            yield path


def _with_ones(folder: Path) -> Iterator[Path]:
    for path in _files(folder):
        if _ONES in path.read_bytes():
            yield path


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[content.index(_ONES) + 34] ^= 0x80  # of the ninth number: 1.0 becomes 0.5
    path.chmod(0o644)
    path.write_bytes(content)
