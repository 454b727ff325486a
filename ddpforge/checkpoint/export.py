"""Weights for other programs: one plain safetensors file out of a checkpoint."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ddpforge.checkpoint import files
from ddpforge.checkpoint.reader import Reader
from ddpforge.checkpoint.schema import Section
from ddpforge.checkpoint.tensors import Source, dtype_name, stream
from ddpforge.errors import CheckpointError, UsageError

Precision = Literal["fp32", "bf16", "fp16"]
_DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What an export wrote."""

    file: Path
    step: int
    tensors: int
    bytes: int
    sha256: str


def export(
    checkpoint: Path,
    out: Path,
    *,
    weights: str = "model",
    dtype: Precision | None = None,
    force: bool = False,
) -> Exported:
    """Writes the model of a checkpoint to the file `out`, which appears complete or not at all.

    `weights` is "model", or the name of a callback that keeps weights of its own (e.g. "ema"); what it does
    not keep (buffers, frozen parameters) comes from the model. `dtype` converts the floating-point tensors.

    A tied parameter is written once and its other names become metadata, as by safetensors' own `save_model`:
    `safetensors.torch.load_model(model, out)` restores the tie.

    Raises UsageError when `out` exists (unless `force`), when no such weights are kept or they do not fit the
    dtype, and CheckpointError when the checkpoint is damaged or the disk refuses.
    """
    if out.exists() and not force:
        raise UsageError(f"{out} exists", hints=["choose another file with --out, or replace it with --force"])

    reader = Reader(checkpoint)
    sources = _sources(reader, "model")
    if weights != "model":
        sources |= _kept_by(weights, reader, sources)
    if dtype is not None:
        sources = {name: _converted(name, source, _DTYPES[dtype]) for name, source in sources.items()}

    size, digest = _write(out, sources, {"format": "pt", **reader.aliases})
    return Exported(file=out, step=reader.facts.step, tensors=len(sources), bytes=size, sha256=digest)


def _sources(reader: Reader, section: Section, owner: str = "") -> dict[str, Source]:
    """A section's tensors, unread; with an owner, that owner's only, without its name."""
    prefix = owner and f"{owner}/"
    return {
        name.removeprefix(prefix): Source(
            dtype_name(reader.dtype(section, name)), reader.shape(section, name), partial(reader.read, section, name)
        )
        for name in reader.names(section)
        if name.startswith(prefix)
    }


def _kept_by(callback: str, reader: Reader, model: Mapping[str, Source]) -> dict[str, Source]:
    """The callback's tensors, provided that they are weights of this model."""
    mine = _sources(reader, "callbacks", callback)
    if not mine or any(name not in model or model[name].shape != kept.shape for name, kept in mine.items()):
        others = ", ".join(sorted({name.partition("/")[0] for name in reader.names("callbacks")})) or "none"
        raise UsageError(
            f"the checkpoint {reader.path} holds no weights called {callback!r}",
            hints=[f"callbacks that saved tensors: {others}"],
        )
    return mine


def _converted(name: str, source: Source, dtype: torch.dtype) -> Source:
    def fetch() -> Tensor:
        tensor = source.fetch()
        converted = tensor.to(dtype)
        if (converted.isinf() & tensor.isfinite()).any():
            raise UsageError(f"{name} holds values too large for {dtype_name(dtype)}", hints=["use bf16"])
        return converted

    floating = getattr(torch, source.dtype).is_floating_point
    return Source(dtype_name(dtype), source.shape, fetch) if floating else source


def _write(out: Path, sources: Mapping[str, Source], metadata: Mapping[str, str]) -> tuple[int, str]:
    """Streams the tensors, one at a time; returns the file's size and sha256."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    digest = hashlib.sha256()

    def blocks() -> Iterator[bytes | memoryview]:
        for block in stream(sources, metadata):
            digest.update(block)
            yield block

    try:
        size, _ = files.write_new(temporary, blocks())
        files.rename(temporary, out)
        files.sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return size, digest.hexdigest()
