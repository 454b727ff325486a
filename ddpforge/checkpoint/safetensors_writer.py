"""Writes tensors as safetensors files and numbers as JSON. Reading either cannot run code.

For reading see `untrusted` and `reader`.
"""

# Not the safetensors library: it copies all tensors to the host before it writes the first, and neither hashes nor
# fsyncs the file.

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from math import prod
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ddpforge import disk
from ddpforge.checkpoint.schema import Number, Scalar, TensorFile
from ddpforge.checkpoint.untrusted import BLOCK, DTYPES
from ddpforge.errors import CheckpointError
from ddpforge.interfaces.regions import TensorShard, held_shape

_ALIGNMENT = 64  # bytes of a cache line: copies from or to unaligned memory take a quarter longer

_DTYPES = {getattr(torch, name): name for name in DTYPES}

_SMALL = 1 << 14  # bytes: tensors up to this size are joined
_MOST = 64  # of them at once: at most a megabyte

Value = Tensor | bool | int | float | str | None


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the dtype as spelled in manifests, e.g. "float32"."""
    return _DTYPES.get(dtype) or str(dtype).removeprefix("torch.")


def is_savable(tensor: Tensor) -> bool:
    """True if the tensor is a plain array of a dtype that safetensors can hold."""
    plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    return plain and tensor.dtype in _DTYPES


def check(tensor: Tensor, what: str) -> None:
    """Raises CheckpointError unless `is_savable`."""
    if is_savable(tensor):
        return
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        problem = f"a {type(tensor).__name__}, not a plain tensor"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        problem = "on the meta device" if tensor.is_meta else "not dense"
    else:
        problem = f"of type {dtype_name(tensor.dtype)}"
    raise CheckpointError(
        f"{what} cannot be saved: it is {problem}",
        hints=[f"a checkpoint holds dense tensors of {', '.join(DTYPES)}"],
    )


class LazyTensor(NamedTuple):
    """Tensor that `fetch` returns when it is to be written."""

    dtype: str
    shape: tuple[int, ...]
    fetch: Callable[[], Tensor]

    @property
    def nbytes(self) -> int:
        """Returns the size of the tensor's contents in bytes."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize

    @classmethod
    def of(cls, tensor: Tensor) -> "LazyTensor":
        """Wraps a tensor that is in memory already."""
        return cls(dtype_name(tensor.dtype), tuple(tensor.shape), lambda: tensor)

    @classmethod
    def of_part(cls, part: TensorShard) -> "LazyTensor":
        """Wraps a part, with the shape that it is stored in."""
        return cls(dtype_name(part.tensor.dtype), held_shape(part.shape, part.simple_region), lambda: part.tensor)


def write_file(path: Path, sources: Mapping[str, LazyTensor]) -> tuple[TensorFile, dict[str, tuple[str, ...]]]:
    """Writes a safetensors file; returns its entry for the manifest, and the hashes of each tensor's blocks."""
    size, hashes = disk.write_new(path, stream(sources, {"format": "pt"}))
    blocks = iter(hashes)
    header = next(blocks)
    found = {name: tuple(islice(blocks, -(-sources[name].nbytes // BLOCK))) for name in _order(sources)}
    return TensorFile(bytes=size, header_xxh3=header), found


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file with these tensors, as `stream` does."""
    return stream({name: LazyTensor.of(tensor) for name, tensor in tensors.items()}, metadata)


def stream(sources: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yields the bytes of a safetensors file: the header, then the tensors one by one in blocks of `BLOCK` bytes.

    Copies one block at a time from a GPU, or about a megabyte of small tensors, and makes as much contiguous.
    """
    names = _order(sources)
    yield _header({name: sources[name] for name in names}, metadata)
    small: list[Tensor] = []
    joined: object = None
    for name in names:
        tensor = sources[name].fetch()
        few = 0 < tensor.nbytes <= min(_SMALL, BLOCK)
        kind = tensor.dtype, tensor.device
        if not few or kind != joined or len(small) >= _MOST:
            yield from _joined(small)
            small, joined = [], kind
        if few:
            small.append(tensor)
            continue
        flat = line(tensor.detach().contiguous())
        step = BLOCK // flat.itemsize
        for start in range(0, len(flat), step):
            yield memoryview(flat[start : start + step].cpu().view(torch.uint8).numpy().data)
    yield from _joined(small)


def _joined(tensors: list[Tensor]) -> Iterator[memoryview]:
    """Yields the bytes of each tensor; all have one dtype and one device."""
    if not tensors:
        return
    with torch.no_grad():
        flat = torch.cat([tensor if tensor.ndim == 1 else tensor.reshape(-1) for tensor in tensors])
    memory = memoryview(flat.cpu().view(torch.uint8).numpy().data)
    start = 0
    for tensor in tensors:
        stop = start + tensor.nbytes
        yield memory[start:stop]
        start = stop


def line(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as a 1-d view with stride 1."""
    # `view(-1)` of a single element may keep another stride.
    return tensor.as_strided((tensor.numel(),), (1,))


def _order(sources: Mapping[str, LazyTensor]) -> list[str]:
    """Sorts names by item size, largest first, so that all tensors are aligned; equal ones keep their order."""
    return sorted(sources, key=lambda name: -DTYPES[sources[name].dtype].itemsize)


def _header(sources: Mapping[str, LazyTensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, source in sources.items():
        end = offset + source.nbytes
        code = DTYPES[source.dtype].code
        entries[name] = {"dtype": code, "shape": list(source.shape), "data_offsets": [offset, end]}
        offset = end

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # aligns the begin of the data
    return len(text).to_bytes(8, "little") + text


# ---------------------------------------------------------------------------------------------- numbers
def to_scalar(value: object, what: str, plain: tuple[type, ...]) -> Scalar:
    """Returns the JSON form of a 0-d tensor or a value of a `plain` type; raises CheckpointError for other values."""
    if isinstance(value, Tensor):
        check(value, what)
        return to_number(value.dtype, value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return Number(dtype="float", value=str(value))
    if isinstance(value, plain):
        return cast(Scalar, value)

    kinds = ", ".join(kind.__name__ for kind in (Tensor, *plain))
    raise CheckpointError(f"{what} cannot be saved: it is a {type(value).__name__}; expected one of {kinds}")


def to_number(dtype: torch.dtype, value: bool | int | float) -> Number:
    """Returns the JSON form of a 0-d tensor with this value."""
    finite = value if math.isfinite(value) else str(value)  # JSON has no NaN and no infinity
    return Number(dtype=dtype_name(dtype), value=finite)


def from_scalar(scalar: Scalar) -> Value:
    """Undoes `to_scalar`; raises ValueError if `to_scalar` cannot have returned `scalar`."""
    if not isinstance(scalar, Number):
        return scalar
    if scalar.dtype == "float":
        return float(scalar.value)
    if scalar.dtype not in DTYPES:
        raise ValueError(f"unknown dtype {scalar.dtype!r} of a number")
    value = float(scalar.value) if isinstance(scalar.value, str) else scalar.value
    try:
        return torch.tensor(value, dtype=getattr(torch, scalar.dtype))
    except RuntimeError as error:
        raise ValueError(f"{scalar.dtype} cannot hold {value}") from error
