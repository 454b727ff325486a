"""Reads files of a checkpoint without trust: regular files only, checked headers, hashed contents. Needs no torch."""

# The safetensors library also rejects a wrong header. But it cannot read into existing memory, and does not return
# the offsets of tensors, which partial and verified reads need.

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from ddpforge import disk
from ddpforge.errors import CheckpointError
from ddpforge.machine import read_sequentially

BLOCK = 64 << 20  # bytes: each block of this size has its own hash. Part of the format

_STRIDE = 1 << 20  # bytes of one read: small enough to be still in the processor's cache when it is hashed
_LIMIT = 100_000_000  # maximum bytes of a header, as in the safetensors library
_Parsed = TypeVar("_Parsed")


class Dtype(NamedTuple):
    """Dtype: its name in safetensors, and the bytes of an element."""

    code: str
    itemsize: int


DTYPES = {
    "float64": Dtype("F64", 8),
    "float32": Dtype("F32", 4),
    "float16": Dtype("F16", 2),
    "bfloat16": Dtype("BF16", 2),
    "float8_e4m3fn": Dtype("F8_E4M3", 1),
    "float8_e5m2": Dtype("F8_E5M2", 1),
    "int64": Dtype("I64", 8),
    "int32": Dtype("I32", 4),
    "int16": Dtype("I16", 2),
    "int8": Dtype("I8", 1),
    "uint8": Dtype("U8", 1),
    "bool": Dtype("BOOL", 1),
}


class Damaged(CheckpointError):
    """Error for a file of a checkpoint that is missing or damaged."""


def damaged(path: Path, reason: str) -> Damaged:
    """Returns the error for one file of a checkpoint."""
    return Damaged(
        f"the checkpoint file {path} is damaged: {reason}",
        hints=["resume without naming a checkpoint: then the newest intact one is used"],
    )


# ---------------------------------------------------------------------------------------------- any file
def size_of(path: Path) -> int:
    """Returns the size of a regular file in bytes; raises CheckpointError for any other file."""
    # A link could lead out of the folder, and a pipe could block forever.
    try:
        return disk.plain_size(path)
    except disk.NotPlain as error:
        raise damaged(path, str(error.strerror)) from error
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error


class PlainFile:
    """Regular file of a checkpoint, open for reading until this object is freed; `size` is in bytes."""

    # All reads share one descriptor: the kernel then recognizes sequential reads and reads ahead in large pieces,
    # which are also copied faster from its cache.
    def __init__(self, path: Path) -> None:
        self.path = path
        with self._reading():
            file = disk.open_plain(path, buffering=0)
        weakref.finalize(self, file.close)
        self._descriptor = file.fileno()
        self.size = os.fstat(self._descriptor).st_size
        read_sequentially(self._descriptor)

    def read_into(self, start: int, buffer: memoryview, seen: Callable[[memoryview], None] = lambda _: None) -> None:
        """Fills the buffer with the bytes from `start` on; calls `seen` with each piece right after its read.

        Thread-safe.
        """
        done = 0
        while done < len(buffer):
            piece = buffer[done : done + _STRIDE]
            with self._reading():
                count = os.preadv(self._descriptor, [piece], start + done)
            if not count:
                raise damaged(self.path, f"it ends before byte {start + len(buffer)}")
            seen(piece[:count])
            done += count

    def read(self, start: int, count: int) -> bytearray:
        """Reads `count` bytes from `start` on."""
        buffer = bytearray(count)
        self.read_into(start, memoryview(buffer))
        return buffer

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except disk.NotPlain as error:
            raise damaged(self.path, str(error.strerror)) from error
        except OSError as error:
            raise damaged(self.path, f"it cannot be read ({error.strerror})") from error


def parse(adapter: TypeAdapter[_Parsed], path: Path, content: bytes | bytearray) -> _Parsed:
    """Parses the JSON `content` of the file `path`; raises CheckpointError with the place of the first error."""
    try:
        with uncollected():
            return adapter.validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise damaged(path, f"{where}: {first['msg']}" if where else first["msg"]) from error


@contextmanager
def uncollected() -> Iterator[None]:
    """Disables garbage collection inside the context."""
    # For code that makes many objects and no garbage: collections would take up to 3/4 of its time.
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


# ---------------------------------------------------------------------------------------------- safetensors
class Claim(NamedTuple):
    """Dtype and shape that a manifest lists for one entry of a safetensors file."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    data_offsets: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]]

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


_HEADER = TypeAdapter(dict[str, Annotated[_Entry | dict[str, str], Field(union_mode="left_to_right")]])


def places(file: PlainFile, claims: Mapping[str, Claim], hashed: str | None) -> dict[str, int]:
    """Returns the offset of each claimed entry in a safetensors file.

    Raises CheckpointError unless the header has the hash `hashed` (None: not checked), its entries are exactly the
    claimed ones, and they fill the file without gaps from the header's end to the last byte. A caller that verifies
    all entries has then verified the whole file.
    """
    path, size = file.path, file.size
    length = int.from_bytes(file.read(0, 8), "little") if size >= 8 else size
    if length > min(size - 8, _LIMIT):
        raise damaged(path, f"its header would have {length} bytes, but the file has {size}")
    content = file.read(0, 8 + length)
    if hashed is not None and disk.xxh3(content).hexdigest() != hashed:
        raise damaged(path, "its header is not as written")

    header = parse(_HEADER, path, content[8:])
    entries = {name: entry for name, entry in header.items() if isinstance(entry, _Entry)}
    if header.keys() - entries.keys() - {"__metadata__"}:
        raise damaged(path, "its header holds something that is neither a tensor nor metadata")
    _check_claims(path, entries, claims)

    end = 0
    for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        start, stop = entry.data_offsets
        if start != end or stop - start != prod(entry.shape) * DTYPES[claims[name].dtype].itemsize:
            raise damaged(path, f"its header puts {name} at the wrong bytes, {start} to {stop} of the data")
        end = stop
    if 8 + length + end != size:
        raise damaged(path, f"according to its header it has {8 + length + end} bytes, but it has {size}")
    return {name: 8 + length + entry.data_offsets[0] for name, entry in entries.items()}


def _check_claims(path: Path, entries: Mapping[str, _Entry], claims: Mapping[str, Claim]) -> None:
    if missing := sorted(claims.keys() - entries.keys()):
        raise damaged(path, f"it lacks {', '.join(missing)}")
    if extra := sorted(entries.keys() - claims.keys()):
        raise damaged(path, f"it holds {', '.join(extra)}, which the manifest does not list")
    for name, claim in claims.items():
        entry = entries[name]
        if (entry.dtype, entry.shape) != (DTYPES[claim.dtype].code, claim.shape):
            raise damaged(
                path,
                f"{name} is {entry.dtype} {list(entry.shape)}; the manifest lists {claim.dtype} {list(claim.shape)}",
            )
