"""Writes weights of a checkpoint to a safetensors file that other programs can read."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ddpforge import disk
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.safetensors_writer import LazyTensor, dtype_name, stream
from ddpforge.checkpoint.schema import Section

__all__ = ["sources", "write_weights"]


def write_weights(path: Path, chosen: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> tuple[int, str]:
    """Writes a new safetensors file, one tensor at a time; returns its size and sha256.

    The further names of tied tensors become metadata, as in `save_model` of safetensors.
    """
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes | memoryview]:
        for block in stream(chosen, {"format": "pt", **aliases}):
            digest.update(block)
            yield block

    size, _ = disk.write_new(path, blocks())
    return size, digest.hexdigest()


def sources(reader: CheckpointReader, section: Section, owner: str = "") -> dict[str, LazyTensor]:
    """Returns a section's tensors, not read yet; with `owner`, only its tensors, named without the prefix."""
    prefix = owner and f"{owner}/"
    return {
        name.removeprefix(prefix): LazyTensor(
            dtype_name(reader.dtype(section, name)), reader.shape(section, name), partial(reader.read, section, name)
        )
        for name in reader.names(section)
        if name.startswith(prefix)
    }
