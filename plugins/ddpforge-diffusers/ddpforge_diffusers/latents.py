"""Latents of images, computed once by an autoencoder and read from files."""

from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
import torch
from ddpforge.errors import SetupError, UsageError, not_there
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

__all__ = ["Latents"]

ddpforge_plugin_api = 3

_SUFFIXES = (".safetensors", ".npz")
_DIMENSIONS = {"latents": 4, "labels": 1, "embeddings": 3, "pooled": 2}
_KEYS = {"latents": "sample", "labels": "label", "embeddings": "embeddings", "pooled": "pooled"}


class Latents:
    """Latents in memory, from a file or from all files of a folder, sorted by name: .safetensors or .npz.

    A file has the tensor `latents` [N, C, H, W], and possibly `labels` [N] of whole numbers, `embeddings` [N, T, D] and
    `pooled` [N, D]. All files have the same tensors. A sample is a mapping with the keys `sample`, `label`,
    `embeddings` and `pooled`; a latent x becomes (x - shift) * scale, float32. The dataset `diffusion_data` with
    range = "any" adds seeds for training.

    Raises SetupError if there is no such file, and UsageError for a file that cannot be read or does not fit.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="File, or folder of files, in .safetensors or .npz.")],
        scale: Annotated[
            float, Field(gt=0, le=1e6, description="Factor on latents: `scaling_factor` of the autoencoder's config.")
        ] = 1.0,
        shift: Annotated[
            float, Field(ge=-1e6, le=1e6, description="Subtracted before: `shift_factor` of the autoencoder's config.")
        ] = 0.0,
        classes: Annotated[
            int | None, Field(ge=1, le=2**24, description="Number of classes; absent: the largest label + 1.")
        ] = None,
    ) -> None:
        parts = [(file, _read(file)) for file in _files(path)]
        first, tensors = parts[0]
        for file, found in parts[1:]:
            for name in sorted(tensors.keys() | found.keys()):
                shapes = [list(one[name].shape[1:]) if name in one else None for one in (tensors, found)]
                if shapes[0] != shapes[1]:
                    raise _mistake(file, f"has `{name}` of the shape {shapes[1]} per sample, but {first} {shapes[0]}")
        self.tensors = {name: torch.cat([found[name] for _, found in parts]) for name in tensors}
        self.tensors["latents"] = (self.tensors["latents"].float() - shift) * scale
        self.classes = classes
        if "labels" in self.tensors:
            largest = int(self.tensors["labels"].max())
            self.classes = classes or largest + 1
            if int(self.tensors["labels"].min()) < 0 or largest >= self.classes:
                raise UsageError(
                    f"classes: {path} has labels from {int(self.tensors['labels'].min())} to {largest}, but there are"
                    f" {self.classes} classes: 0 to {self.classes - 1}",
                    key="classes",
                )

    def __len__(self) -> int:
        return len(self.tensors["latents"])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {_KEYS[name]: tensor[index] for name, tensor in self.tensors.items()}


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise SetupError(f"path: there is no file or folder {path}", hints=not_there(path), key="path")
    files = sorted(one for one in path.iterdir() if one.suffix in _SUFFIXES) if path.is_dir() else [path]
    if not files:
        raise SetupError(f"path: {path} has no .safetensors or .npz files", key="path")
    if files[0].suffix not in _SUFFIXES:
        raise _mistake(path, "is not a .safetensors or .npz file")
    return files


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".npz":
            with np.load(file, allow_pickle=False) as arrays:
                found = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
        else:
            found = load_file(file)
    except (OSError, ValueError, TypeError, EOFError, BadZipFile, SafetensorError) as error:
        raise _mistake(file, f"cannot be read: {error}") from error
    if "latents" not in found:
        raise _mistake(file, f"has no tensor `latents`; it has {', '.join(map(repr, sorted(found))) or 'none'}")
    if unknown := sorted(found.keys() - _DIMENSIONS.keys()):
        raise _mistake(file, f"has the unknown tensor `{unknown[0]}`; known: {', '.join(_DIMENSIONS)}")
    for name, tensor in found.items():
        if tensor.ndim != _DIMENSIONS[name]:
            shape = list(tensor.shape)
            raise _mistake(file, f"has `{name}` of the shape {shape}; expected {_DIMENSIONS[name]} dimensions")
        if len(tensor) != len(found["latents"]):
            raise _mistake(file, f"has {len(found['latents'])} latents, but {len(tensor)} `{name}`")
        if tensor.is_floating_point() == (name == "labels"):
            raise _mistake(file, f"has `{name}` of the dtype {tensor.dtype}")
    if not len(found["latents"]):
        raise _mistake(file, "has no latents")
    return found


def _mistake(file: Path, fault: str) -> UsageError:
    return UsageError(f"path: {file} {fault}", key="path")
