"""A safetensors file of a checkpoint's weights, as other programs read it."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ddpforge import disk
from ddpforge.checkpoint.reader import Reader
from ddpforge.checkpoint.safetensors_writer import LazyTensor, dtype_name, stream
from ddpforge.checkpoint.schema import Section

__all__ = ["sources", "write_weights"]


def write_weights(path: Path, chosen: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> tuple[int, str]:
    """Writes a new safetensors file, one tensor at a time; returns its size and sha256.

    The further names of tied tensors become metadata, as by safetensors' own `save_model`.
    """
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes | memoryview]:
        for block in stream(chosen, {"format": "pt", **aliases}):
            digest.update(block)
            yield block

    size, _ = disk.write_new(path, blocks())
    return size, digest.hexdigest()


def sources(reader: Reader, section: Section, owner: str = "") -> dict[str, LazyTensor]:
    """A section's tensors, unread; with an owner, that owner's only, without its name."""
    prefix = owner and f"{owner}/"
    return {
        name.removeprefix(prefix): LazyTensor(
            dtype_name(reader.dtype(section, name)), reader.shape(section, name), partial(reader.read, section, name)
        )
        for name in reader.names(section)
        if name.startswith(prefix)
    }
