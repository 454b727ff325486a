"""Reads checkpoints of torch.distributed.checkpoint (DCP): every shard, at its place according to the metadata."""

import io
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from ddpforge.interfaces import CheckpointFormat, ForeignState
from ddpforge.interfaces.regions import Box, TensorShard
from ddpforge.interop.foreign.foreign_state import Held, inside, listed, regular, rejected, untrusted

METADATA = ".metadata"
_MODELS = (("model",), ("state_dict",), ("model_state_dict",), ("module",), ("app", "model"), ())
_FLAT = re.compile(r"state\.(.+)\.([^.]+)")  # the keys of `flatten_optimizer_state_dict`

Path_ = tuple[Any, ...]


class DCP(CheckpointFormat):
    """Folder of torch.distributed.checkpoint."""

    def matches(self, path: Path) -> bool:
        """True for a folder with metadata of DCP."""
        return (path / METADATA).exists()

    def read(self, path: Path, *, trust: bool) -> ForeignState:
        """See `read`."""
        return read(path, trust=trust)


def read(folder: Path, *, trust: bool) -> ForeignState:
    """Reads model and optimizer state, with the names of `get_state_dict`, into memory.

    Raises UsageError if the folder is not valid, and without `trust`, because the metadata are a pickle.
    """
    if not trust:
        raise untrusted(folder, "the .metadata of a DCP folder")
    metadata = _metadata(regular(folder / METADATA))
    try:
        return _found(folder, metadata)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise rejected(folder, f"its metadata contradict its files ({type(error).__name__}: {error})") from error


def _found(folder: Path, metadata: Metadata) -> ForeignState:
    tensors = {k: x for k, x in metadata.state_dict_metadata.items() if isinstance(x, TensorStorageMetadata)}
    paths = _paths(folder, metadata)

    prefix = _model_prefix(folder, [paths[key] for key in tensors])
    names = {_last(paths[key]): key for key in tensors if _is_under(paths[key], prefix)}
    optimizer: dict[tuple[str, str], str] = {}
    left_out: list[str] = []
    for key in metadata.state_dict_metadata:
        if (state := _optimizer_entry(paths[key], names)) is not None and key in tensors:
            optimizer[state] = key
        elif key not in tensors:
            left_out.append(f"{key}: not a tensor")
        elif not _is_under(paths[key], prefix):
            left_out.append(f"{key}: neither a weight nor optimizer state of a weight")

    pieces = _Pieces(folder, metadata)
    found = ForeignState(kind="DCP", model={name: pieces.of(key) for name, key in names.items()}, left_out=left_out)
    for (name, field), key in optimizer.items():
        found.optimizer.setdefault(name, {})[field] = pieces.of(key)
    return found


def _metadata(path: Path) -> Metadata:
    try:
        with path.open("rb") as file:
            metadata = pickle.load(file)
    except Exception as error:  # a damaged pickle can raise anything
        raise rejected(path, f"it cannot be read ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, Mapping):
        raise rejected(path, "it is not the metadata of a DCP checkpoint on disk")
    return metadata


def _paths(folder: Path, metadata: Metadata) -> dict[str, Path_]:
    """Returns the path of each entry in the nested state dict: ("optim", "state", "layer.weight", "exp_avg")."""
    data = metadata.planner_data
    if not isinstance(data, Mapping) or not metadata.state_dict_metadata.keys() <= data.keys():
        raise rejected(folder, "its metadata lack the places of tensors in the state_dict")
    return {key: path if isinstance(path, tuple) else (path,) for key, path in data.items()}


def _is_under(path: Path_, prefix: Path_) -> bool:
    return path[:-1] == prefix and isinstance(path[-1], str)


def _last(path: Path_) -> str:
    return str(path[-1])


def _model_prefix(folder: Path, paths: list[Path_]) -> Path_:
    """Returns the path of the table in the state dict that contains the weights."""
    for prefix in _MODELS:
        if any(_is_under(path, prefix) for path in paths):
            return prefix
    tables = sorted({".".join(map(str, path[:-1])) for path in paths})
    raise rejected(folder, f'none of its tables is called "model"; it has {listed(tables) or "no tensors"}')


def _optimizer_entry(path: Path_, names: Mapping[str, str]) -> tuple[str, str] | None:
    """Returns parameter name and state key if the path is in the optimizer state of a parameter, else None."""
    match path:
        case (*_, "state", str(name), str(key)) if name in names:
            return name, key
        case (_, *_, str(flat)) if (found := _FLAT.fullmatch(flat)) and found[1] in names:
            return found[1], found[2]
        case _:
            return None


class _Pieces:
    """Shards of tensors, each read from its place according to the metadata."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        self.folder = folder
        self.entries = metadata.state_dict_metadata
        self.stored: dict[str, list[tuple[Any, Any]]] = {}
        for index, info in metadata.storage_data.items():
            self.stored.setdefault(index.fqn, []).append((index, info))

    def of(self, key: str) -> Held:
        """Returns a whole tensor, or its parts."""
        entry = self.entries[key]
        assert isinstance(entry, TensorStorageMetadata)
        shape, dtype = tuple(entry.size), entry.properties.dtype
        sizes = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in entry.chunks}
        parts = []
        for index, info in self.stored.get(key, ()):
            offset = tuple(index.offset) if index.offset is not None else (0,) * len(shape)
            tensor = self._read(key, info)
            if tuple(tensor.shape) != sizes.get(offset) or tensor.dtype != dtype:
                raise rejected(self.folder, f"a shard of {key} does not match the metadata")
            parts.append(TensorShard(tensor, shape, Box(offset, tuple(tensor.shape))))
        return parts[0].tensor if len(parts) == 1 and tuple(parts[0].tensor.shape) == shape else parts

    def _read(self, key: str, info: Any) -> Tensor:
        if getattr(info, "transform_descriptors", None):
            raise rejected(self.folder, f"{key} is compressed or otherwise transformed, which is not supported")
        with inside(self.folder, info.relative_path).open("rb") as file:
            file.seek(info.offset)
            content = file.read(info.length)
        try:
            tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged file can make the unpickler raise anything
            raise rejected(self.folder / info.relative_path, f"{key} in it cannot be read ({error})") from error
        if not isinstance(tensor, Tensor):
            raise rejected(self.folder / info.relative_path, f"{key} in it is not a tensor")
        return tensor.detach()
