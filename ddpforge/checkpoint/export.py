"""Weights for other programs: one plain safetensors file out of a checkpoint."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ddpforge.checkpoint import files, tensors
from ddpforge.checkpoint.format import read_section
from ddpforge.checkpoint.manifest import Manifest, read_manifest
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

    manifest = read_manifest(checkpoint, verify=True)
    chosen = read_section(checkpoint, manifest, "model")
    if weights != "model":
        chosen |= _kept_by(weights, checkpoint, manifest)
    if dtype is not None:
        chosen = {name: _convert(name, tensor, _DTYPES[dtype]) for name, tensor in chosen.items()}

    size, digest = _write(out, chosen, {"format": "pt", **manifest.aliases})
    return Exported(file=out, step=manifest.step, tensors=len(chosen), bytes=size, sha256=digest)


def _kept_by(callback: str, checkpoint: Path, manifest: Manifest) -> dict[str, Tensor]:
    """The callback's tensors, provided that they are weights of this model."""
    model = {name: entry.shape for name, entry in manifest.tensors.get("model", {}).items()}
    kept = read_section(checkpoint, manifest, "callbacks")
    mine = {name.removeprefix(f"{callback}/"): t for name, t in kept.items() if name.startswith(f"{callback}/")}
    if not mine or any(model.get(name) != t.shape for name, t in mine.items()):
        others = ", ".join(sorted({name.partition("/")[0] for name in kept})) or "none"
        raise UsageError(
            f"the checkpoint {checkpoint} holds no weights called {callback!r}",
            hints=[f"callbacks that saved tensors: {others}"],
        )
    return mine


def _convert(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if (converted.isinf() & tensor.isfinite()).any():
        raise UsageError(f"{name} holds values too large for {tensors.dtype_name(converted)}", hints=["use bf16"])
    return converted


def _write(out: Path, content: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[int, str]:
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        size, digest = files.write_new(temporary, tensors.encode(content, metadata))
        files.rename(temporary, out)
        files.sync_folder(out.parent)
    except OSError as error:
        raise CheckpointError(f"{out} could not be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return size, digest
