"""Finds the weights that a checkpoint holds, and writes them to a safetensors file that other programs can read."""

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from ddpforge import disk
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.safetensors_writer import LazyTensor, dtype_name, stream
from ddpforge.checkpoint.schema import Section
from ddpforge.errors import UsageError

__all__ = ["OF_TASK", "chosen_weights", "sources", "write_weights"]

OF_TASK = "task."  # prefix of the names of a task's auxiliary modules


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


def chosen_weights(reader: CheckpointReader, weights: str) -> dict[str, LazyTensor]:
    """Returns the weights of the model or of a callback, in the model's order, without reading them; see `export`."""
    chosen = sources(reader, "model")
    return chosen if weights == "model" else chosen | _kept_by(weights, reader, chosen)


def _kept_by(callback: str, reader: CheckpointReader, model: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Returns the callback's tensors; raises UsageError unless they are weights of this model."""
    mine = sources(reader, "callbacks", callback)
    if not mine or any(name not in model or model[name].shape != kept.shape for name, kept in mine.items()):
        others = ", ".join(sorted({name.partition("/")[0] for name in reader.names("callbacks")})) or "none"
        raise UsageError(
            f"the checkpoint {reader.path} contains no weights called {callback!r}",
            hints=[
                f"`{callback}` is an auxiliary module with tensor names of its own: `ddpforge export` can write it"
                if mine and callback.startswith(OF_TASK)
                else f"callbacks that saved tensors: {others}"
            ],
        )
    return mine
