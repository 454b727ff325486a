"""Reads weights by name: safetensors and state dicts, in one file or split over several as in transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CheckpointFormat, ForeignState, Region
from ddpforge.interfaces.regions import copy_from
from ddpforge.interop.foreign.foreign_state import inside, listed, load, regular, rejected, tied

SINGLE = {"model.safetensors": "safetensors", "pytorch_model.bin": "state_dict"}
INDEXED = {f"{name}.index.json": kind for name, kind in SINGLE.items()}
_SAFE = ("model.safetensors", "model.safetensors.index.json")
_NESTED = ("model", "state_dict", "model_state_dict", "module")


class Safetensors(CheckpointFormat):
    """File of safetensors, or a folder of them with the file names of transformers."""

    def matches(self, path: Path) -> bool:
        """True for such a folder, and for a file with the header of safetensors."""
        if path.is_dir():
            return any(_is_there(path / name) for name in _SAFE)
        try:
            with path.open("rb") as file:
                return file.read(9)[8:] == b"{"
        except OSError:
            return False

    def read(self, path: Path, *, trust: bool) -> ForeignState:
        """Reads the weights."""
        return read_folder(path, trust=trust) if path.is_dir() else read_file(path, trust=trust)

    def open(self, path: Path) -> dict[str, _InFile]:
        """Returns the tensors, mapped into memory."""
        single, index = (path / name for name in _SAFE)
        try:
            if not index.is_file():
                return _of_file(single if path.is_dir() else path)
            files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if any(Path(name).name != name for name in files):
                raise CheckpointError(f"{index} names files outside its folder")
            return {name: tensor for file in sorted(files) for name, tensor in _of_file(path / file).items()}
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as safetensors: {error}",
                hints=["`ddpforge ckpt import` converts checkpoints of other formats"],
            ) from error


class StateDict(CheckpointFormat):
    """File of `torch.save`, or a folder of them with the file names of transformers."""

    def matches(self, path: Path) -> bool:
        """True for such a folder, for an archive of `torch.save`, and for a plain pickle."""
        if path.is_dir():
            return is_folder(path)
        if path.is_file() and is_zipfile(path):  # also the format of other programs
            with ZipFile(path) as archive:
                return any(name.endswith("/data.pkl") for name in archive.namelist())
        return path.is_file() and is_pickle(path)

    def read(self, path: Path, *, trust: bool) -> ForeignState:
        """Reads the weights; without `trust` only tensors and plain containers of tensors."""
        return read_folder(path, trust=trust) if path.is_dir() else read_file(path, trust=trust)


def _of_file(path: Path) -> dict[str, _InFile]:
    file: Any = safe_open(path, framework="pt")
    return {name: _InFile(file, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


@dataclass(frozen=True)
class _InFile:
    """Tensor in a safetensors file, which is mapped into memory."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.read().dtype

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def read_into(self, region: Region, target: Tensor) -> None:
        copy_from(self.read(), region, target)


def is_pickle(path: Path) -> bool:
    """True if a file begins like a file of `torch.save`: a zip archive, or a plain pickle of an old version."""
    with path.open("rb") as file:
        start = file.read(4)
    return start == b"PK\x03\x04" or start[:1] == b"\x80"


def read_file(path: Path, *, trust: bool) -> ForeignState:
    """Reads the weights in one file."""
    if is_pickle(path):
        named, left_out = _state_dict(path, trust=trust)
        kept, aliases = tied(named)
        return ForeignState(kind="state_dict", model={**kept}, aliases=aliases, left_out=left_out)
    named, aliases = _safetensors(path)
    return ForeignState(kind="safetensors", model={**named}, aliases=aliases)


def is_folder(folder: Path) -> bool:
    """True if `read_folder` can read the folder."""
    return any(_is_there(folder / name) for name in (*SINGLE, *INDEXED))


def _is_there(path: Path) -> bool:
    return path.exists() or path.is_symlink()


def read_folder(folder: Path, *, trust: bool) -> ForeignState:
    """Reads the weights in a folder of transformers' `save_pretrained`, or of `ddpforge export`."""
    for name, kind in SINGLE.items():
        if _is_there(folder / name):
            found = read_file(regular(folder / name), trust=trust)
            if found.kind != kind:
                raise rejected(folder / name, f"its name is of a {kind}, but its content is not")
            break
    else:
        name, kind = next(each for each in INDEXED.items() if _is_there(folder / each[0]))
        found = _read_indexed(folder, name, kind, trust=trust)
    others = sorted(
        path.name for path in folder.iterdir() if re.match(r"(optimizer|scheduler|scaler|rng|random)", path.name)
    )
    found.left_out += [f"{other}: only weights are imported from such a folder" for other in others]
    return found


def _read_indexed(folder: Path, index: str, kind: str, *, trust: bool) -> ForeignState:
    places = _weight_map(inside(folder, index))
    model: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    left_out: list[str] = []
    for file in dict.fromkeys(places.values()):
        path = inside(folder, file)
        if is_pickle(path) != (kind == "state_dict"):
            raise rejected(path, f"its name is of a {kind}, but its content is not")
        if kind == "state_dict":
            found, rest = _state_dict(path, trust=trust)
            left_out += rest
        else:
            found, ties = _safetensors(path)
            aliases |= ties
        wanted = {name for name, place in places.items() if place == file}
        if found.keys() != wanted:
            odd = sorted(found.keys() ^ wanted)
            raise rejected(path, f"its tensors are not the tensors that {index} names: {listed(odd)}")
        model |= found
    if kind == "state_dict":
        model, aliases = tied(model)
    return ForeignState(kind=kind, model={**model}, aliases=aliases, left_out=left_out)


def _weight_map(path: Path) -> dict[str, str]:
    try:
        places = json.loads(path.read_bytes())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise rejected(path, "it is not an index of weights") from error
    if not isinstance(places, dict) or not places:
        raise rejected(path, "it is not an index of weights")
    return places


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns all tensors, mapped into memory and not yet read, and the aliases of tied tensors in the metadata."""
    try:
        with safe_open(path, framework="pt") as file:
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            metadata: Mapping[str, str] = file.metadata() or {}
    except (SafetensorError, OSError, ValueError, AttributeError, RuntimeError) as error:
        raise rejected(path, f"it is not a safetensors file ({error})") from error
    return named, {name: other for name, other in metadata.items() if other in named and name not in named}


def _state_dict(path: Path, *, trust: bool) -> tuple[dict[str, Tensor], list[str]]:
    """Returns the tensors of a state dict, which may be nested in a dictionary, and a list of the other entries."""
    loaded = load(path, trust=trust)
    left_out: list[str] = []
    if not isinstance(loaded, Mapping):
        raise rejected(path, f"it contains a {type(loaded).__name__}, not tensors by name")
    if not _some(loaded, Tensor):
        nested = [key for key in _NESTED if isinstance(loaded.get(key), Mapping) and _some(loaded[key], Tensor)]
        if len(nested) != 1:
            keys = listed([str(key) for key in loaded])
            raise rejected(path, f"it has no tensors by name; it contains {keys or 'nothing'}")
        left_out = [f"{key}: {_what(value)}" for key, value in loaded.items() if key != nested[0]]
        loaded = loaded[nested[0]]
    left_out += [f"{name}: not a tensor" for name, value in loaded.items() if not isinstance(value, Tensor)]
    return {str(name): x.detach() for name, x in loaded.items() if isinstance(x, Tensor)}, left_out


def _some(values: Mapping[Any, Any], kind: type) -> bool:
    return any(isinstance(value, kind) for value in values.values())


def _what(value: object) -> str:
    if isinstance(value, Mapping) and {"state", "param_groups"} <= value.keys():
        return "optimizer state by number; the names of its parameters are unknown"
    return "not weights"
