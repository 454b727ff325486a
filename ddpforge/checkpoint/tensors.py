"""Tensors to and from safetensors files: plain bytes behind a JSON header, so that reading cannot run code.

Reading is left to the safetensors library, which trusts no header. Writing is done here, because the library
copies all tensors to the host before it writes the first, and neither hashes nor fsyncs what it wrote.
"""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpforge.checkpoint.manifest import Number, Scalar, TensorEntry, damaged
from ddpforge.errors import CheckpointError

Value = Tensor | bool | int | float | str | None

_CHUNK = 64 << 20  # bytes per write
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def dtype_name(tensor: Tensor) -> str:
    """The dtype as manifests spell it: "float32"."""
    return str(tensor.dtype).removeprefix("torch.")


def check(tensor: Tensor, what: str) -> None:
    """Raises CheckpointError unless the tensor is a plain array of a dtype that safetensors can hold."""
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        problem = f"a {type(tensor).__name__}, which is more than an array of numbers"
    elif tensor.is_meta or tensor.layout is not torch.strided:
        problem = "on the meta device" if tensor.is_meta else "not dense"
    elif dtype_name(tensor) not in _CODES:
        problem = f"of type {dtype_name(tensor)}"
    else:
        return
    raise CheckpointError(
        f"{what} cannot be saved: it is {problem}",
        hints=[f"a checkpoint holds dense tensors of {', '.join(_CODES)}"],
    )


def encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, one tensor at a time: at most one is on the host twice."""
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))  # wide types first: all aligned
    yield _header({name: tensors[name] for name in order}, metadata)

    for name in order:
        flat = tensors[name].detach().cpu().contiguous().reshape(-1)
        data = memoryview(flat.view(torch.uint8).numpy().data)
        for start in range(0, len(data), _CHUNK):
            yield data[start : start + _CHUNK]


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        code = _CODES[dtype_name(tensor)]
        entries[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end

    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts aligned, too
    return len(text).to_bytes(8, "little") + text


def decode(path: Path, expected: Mapping[str, TensorEntry]) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises CheckpointError unless they are exactly the expected ones, by name, dtype and shape.
    """
    try:
        with safe_open(path, framework="pt") as file:
            _check_names(path, set(file.keys()), set(expected))
            for name, entry in expected.items():
                found = file.get_slice(name)
                shape, code = tuple(found.get_shape()), found.get_dtype()
                if (shape, code) != (entry.shape, _CODES.get(entry.dtype)):
                    claim = f"{entry.dtype} {list(entry.shape)}"
                    raise damaged(path, f"{name} is {code} {list(shape)}, and the manifest says {claim}")

            # Cloned, because what the library returns may still be the file itself, mapped into memory.
            return {name: file.get_tensor(name).clone() for name in expected}
    except (SafetensorError, OSError) as error:
        raise damaged(path, str(error)) from error


def _check_names(path: Path, found: set[str], expected: set[str]) -> None:
    if missing := sorted(expected - found):
        raise damaged(path, f"it lacks {', '.join(missing)}")
    if extra := sorted(found - expected):
        raise damaged(path, f"it holds {', '.join(extra)}, which the manifest does not list")


# ---------------------------------------------------------------------------------------------- numbers
def to_scalar(value: object, what: str, plain: tuple[type, ...]) -> Scalar:
    """The JSON form of a 0-d tensor or a value of a `plain` type; raises CheckpointError for all else."""
    if isinstance(value, Tensor):
        check(value, what)
        return Number(dtype=dtype_name(value), value=_finite(value.item()))
    if isinstance(value, float) and not math.isfinite(value):
        return Number(dtype="float", value=str(value))
    if isinstance(value, plain):
        return cast(Scalar, value)

    kinds = ", ".join(kind.__name__ for kind in (Tensor, *plain))
    raise CheckpointError(f"{what} cannot be saved: it is a {type(value).__name__}; expected one of {kinds}")


def from_scalar(scalar: Scalar) -> Value:
    """What `to_scalar` was given; raises ValueError where it cannot have been anything."""
    if not isinstance(scalar, Number):
        return scalar
    if scalar.dtype == "float":
        return float(scalar.value)
    if scalar.dtype not in _CODES:
        raise ValueError(f"there is no tensor of type {scalar.dtype!r}")
    value = float(scalar.value) if isinstance(scalar.value, str) else scalar.value
    try:
        return torch.tensor(value, dtype=getattr(torch, scalar.dtype))
    except RuntimeError as error:
        raise ValueError(f"{scalar.dtype} cannot hold {value}") from error


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no NaN and no infinity
