"""Reads any region of any tensor of a checkpoint, without loading the rest."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from ddpforge.checkpoint import untrusted
from ddpforge.checkpoint.manifest import altered, check_sha256, claims_of, layout_of, read_block, read_manifest
from ddpforge.checkpoint.safetensors_writer import dtype_name, line
from ddpforge.checkpoint.schema import MANIFEST, Chunk, Manifest, OtherFile, Section, TensorEntry, TensorFile
from ddpforge.checkpoint.state import CALLBACKS, OPTIMIZER, SHARED, CheckpointMetadata, Plain, metadata_of, unflatten
from ddpforge.checkpoint.untrusted import BLOCK, PlainFile, damaged
from ddpforge.disk import xxh3_hex
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, SavedTensor
from ddpforge.interfaces.regions import (
    Box,
    BoxList,
    FlatRange,
    Region,
    Shape,
    Simple,
    copy,
    normal,
    overlaps,
    pieces,
    split,
    whole,
)

_SMALL = 1 << 12  # bytes: tensors up to this size are read ahead
_AHEAD = 1 << 16  # bytes
_MOST_OPEN = 64  # files: a checkpoint may have more than a process may open

T = TypeVar("T")


class CheckpointReader:
    """Open checkpoint of any format and layout.

    With `verify`, each 64 MiB block of a file is checked against its hash at the first read that touches it. In
    addition to the target tensors, the reader needs memory for one block in each thread that reads. Every method
    raises CheckpointError with the name of the file if it is missing, damaged, too new, or contradicts the manifest.
    """

    def __init__(self, path: Path, *, verify: bool = True, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest or read_manifest(path)
        self._verify = verify
        self._layout = layout_of(path, self.manifest)
        self._begins: dict[str, dict[str, int]] = {}  # offset of each entry, for each file that was opened
        self._verified: set[tuple[str, str, int]] = set()  # file, entry, number of the block
        self._opening = threading.Lock()
        # A file that is dropped is closed after its last read.
        self._files = lru_cache(_MOST_OPEN)(lambda name: PlainFile(path / name))
        self._spare = _Spare()

    # -- facts and state
    @property
    def metadata(self) -> CheckpointMetadata:
        """Returns the checkpoint's facts about its run."""
        return metadata_of(self.manifest)

    @property
    def aliases(self) -> dict[str, str]:
        """Maps each further name of a tied parameter to the name that it is stored under."""
        return self.manifest.aliases

    def state(self) -> CanonicalState[SavedTensor]:
        """Returns the state of model and optimizer; tensors are not read yet."""
        optimizer = self._guarded(lambda: unflatten(self.manifest.optimizer, self._saved("optimizer"), OPTIMIZER))
        # Optimizer state holds no strings: the schema of the manifest does not allow them.
        numbers = cast(Mapping[str, Mapping[str, SavedTensor | Tensor | int | float | bool | None]], optimizer)
        shared = numbers.get(SHARED, {})
        owned = {owner: entry for owner, entry in numbers.items() if owner != SHARED}
        return CanonicalState(
            model=self._saved("model"),
            optimizer=owned,
            aliases=self.aliases,
            extra_state=shared,
            scalars=cast(Mapping[str, int | float], self.manifest.loop),
        )

    def callbacks(self) -> dict[str, dict[str, SavedTensor | Plain]]:
        """Returns the state of callbacks by name and key; tensors are not read yet."""
        kept = self._guarded(lambda: unflatten(self.manifest.callbacks, self._saved("callbacks"), CALLBACKS))
        return cast(dict[str, dict[str, SavedTensor | Plain]], kept)

    def _saved(self, section: Section) -> dict[str, SavedTensor]:
        return {name: Saved(self, section, name) for name in self.names(section)}

    def _guarded(self, action: Callable[[], T]) -> T:
        try:
            return action()
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise damaged(self.path / MANIFEST, str(error)) from error

    # -- tensors
    def names(self, section: Section) -> list[str]:
        """Lists a section's tensors: "<parameter>", "<parameter>/<key>" of the optimizer, "<callback>/<key>"."""
        return list(self.manifest.tensors.get(section, {}))

    def shape(self, section: Section, name: str) -> Shape:
        """Returns the shape of the whole tensor."""
        return self._entry(section, name).shape

    def dtype(self, section: Section, name: str) -> torch.dtype:
        """Returns the dtype of the saved tensor."""
        return cast(torch.dtype, getattr(torch, self._entry(section, name).dtype))

    def read(self, section: Section, name: str) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        entry = self._entry(section, name)
        for chunk in entry.chunks:
            self._open(chunk.file)  # check the file before allocating the size in the untrusted manifest
        tensor = torch.empty(entry.shape, dtype=self.dtype(section, name))
        self.read_into(section, name, whole(entry.shape), tensor)
        return tensor

    def read_into(self, section: Section, name: str, region: Region, target: Tensor) -> None:
        """Fills `target` with a region of a tensor.

        `target` may be on any device. It must have the tensor's dtype, and the shape of the region. A range has no
        shape: it fills the elements of a target with as many elements, in row-major order.
        """
        for simple, part in pieces(region, target):
            self._read_simple(section, name, simple, part)

    def _read_simple(self, section: Section, name: str, region: Simple, target: Tensor) -> None:
        entry = self._entry(section, name)
        if (found := dtype_name(target.dtype)) != entry.dtype:
            raise CheckpointError(f"{name} ({section}) of {self.path} is {entry.dtype}; it cannot be read into {found}")
        if len(entry.chunks) == 1 and self._read_small(entry.chunks[0], region, target):
            return
        try:
            region, target = _arranged(entry.shape, region, target.detach())
        except ValueError as error:
            raise CheckpointError(f"{name} ({section}) of {self.path} cannot be read: {error}") from error

        filled = sum(self._read_chunk(entry, chunk, region, target) for chunk in entry.chunks)
        if filled != region.numel:
            raise damaged(self.path / MANIFEST, f"it lists {filled} of {region.numel} elements of {name} ({section})")

    def finish(self) -> None:
        """Closes all files; with `verify`, checks the files first that no tensor was read from.

        If all tensors were read before, every byte of the checkpoint has then been verified.
        """
        if self._verify:
            for file in self.manifest.files.keys() - self._begins.keys():
                self._open(file)
        self.close()

    def close(self) -> None:
        """Closes all files; later reads open them again. A removed file takes disk space until it is closed."""
        self._files.cache_clear()

    def _entry(self, section: Section, name: str) -> TensorEntry:
        try:
            return self.manifest.tensors[section][name]
        except KeyError:
            raise CheckpointError(f"the checkpoint {self.path} has no tensor {name} ({section})") from None

    def _open(self, file: str) -> dict[str, int]:
        """Checks a file's header at the first call; returns the offset of each entry."""
        with self._opening:
            if file not in self._begins:
                entry = self.manifest.files[file]
                claims = claims_of(self._layout.get(file, {}))
                if isinstance(entry, TensorFile):
                    self._begins[file] = untrusted.places(self._file(file), claims, entry.header_xxh3)
                else:
                    if self._verify:
                        check_sha256(self.path / file, entry)
                    self._begins[file] = untrusted.places(self._file(file), claims, None) if claims else {}
            return self._begins[file]

    def _file(self, name: str) -> PlainFile:
        return self._files(name)

    # -- from a file into a tensor
    def _read_chunk(self, entry: TensorEntry, chunk: Chunk, region: Simple, target: Tensor) -> int:
        """Copies the elements of the region that are in this chunk into the target; returns their number."""
        shape, source = entry.shape, chunk.region
        if not overlaps(shape, source, region):
            return 0
        if source == region and target.is_contiguous():  # both have the same element order: treat them as ranges
            shape, target = (region.numel,), line(target)
            source = region = whole(shape)

        filled, step = 0, BLOCK // target.itemsize
        begin = self._open(chunk.file)[chunk.entry]
        for number, start in enumerate(range(0, source.numel, step)):
            stop = min(start + step, source.numel)
            block = _Block(chunk, number, begin + number * BLOCK, (stop - start) * target.itemsize)
            parts = split(source, start, stop)
            if isinstance(source, FlatRange) and isinstance(region, FlatRange):
                filled += self._read_range(block, FlatRange(source.start + start, source.start + stop), region, target)
            elif any(overlaps(shape, part, region) for part, _ in parts):
                held = self._load(block, target.dtype)
                for part, at in parts:
                    piece = held[at - start : at - start + part.numel]
                    piece = piece.view(part.size) if isinstance(part, Box) else piece
                    filled += copy(shape, part, piece, region, target)
        return filled

    def _read_small(self, chunk: Chunk, region: Simple, target: Tensor) -> bool:
        """Fills a small target on the host if it is exactly the chunk; returns whether it did.

        Reads the file ahead: a checkpoint may have 100,000 small tensors, mostly read in the order of the file.
        """
        size = target.nbytes
        if not (
            (0 < size <= min(_SMALL, BLOCK) and target.device.type == "cpu" and target.is_contiguous())
            and (isinstance(region, FlatRange) and region == chunk.region and region.numel == target.numel())
        ):
            return False
        block, spare = _Block(chunk, 0, self._open(chunk.file)[chunk.entry], size), self._spare
        if spare.file != chunk.file or not 0 <= block.begin - spare.start <= len(spare.ahead) - size:
            file = self._file(chunk.file)
            spare.ahead = file.read(block.begin, max(size, min(_AHEAD, file.size - block.begin)))
            spare.file, spare.start = chunk.file, block.begin
        start = block.begin - spare.start
        if not self._known(block):
            if xxh3_hex(memoryview(spare.ahead)[start : start + size]) != chunk.hashes[0]:
                raise altered(self.path / chunk.file, chunk, 0)
            self._verified.add(block.key)
        held = torch.frombuffer(spare.ahead, dtype=target.dtype, count=region.numel, offset=start)
        target.detach().copy_(held if target.ndim == 1 else held.view(target.shape))
        return True

    def _read_range(self, block: "_Block", held: FlatRange, region: FlatRange, target: Tensor) -> int:
        """Copies the overlap of two ranges, if possible by reading into the target directly; returns its size."""
        start, stop = max(held.start, region.start), min(held.stop, region.stop)
        if start >= stop:
            return 0
        wanted = target[start - region.start : stop - region.start]
        all_of_it = stop - start == held.numel
        if wanted.device.type == "cpu" and wanted.stride(0) == 1 and (all_of_it or self._known(block)):
            self._fill(block, wanted, (start - held.start) * target.itemsize)
        else:
            wanted.copy_(self._load(block, target.dtype)[start - held.start : stop - held.start])
        return stop - start

    def _load(self, block: "_Block", dtype: torch.dtype) -> Tensor:
        """Returns the contents of a block; they are overwritten when this thread loads the next block."""
        if len(self._spare.memory) < block.nbytes:
            self._spare.memory = torch.empty(block.nbytes, dtype=torch.uint8)
        loaded = self._spare.memory[: block.nbytes]
        self._fill(block, loaded, 0)
        return loaded.view(dtype)

    def _fill(self, block: "_Block", memory: Tensor, skip: int) -> None:
        """Fills memory with the bytes of a block after the first `skip` bytes."""
        view = memoryview(memory.view(torch.uint8).numpy().data)
        file = self._file(block.chunk.file)
        if self._known(block):
            file.read_into(block.begin + skip, view)
        else:
            read_block(file, block.begin, block.chunk, block.number, view)
            self._verified.add(block.key)

    def _known(self, block: "_Block") -> bool:
        """True if the block's hash need not be checked, or was checked before."""
        whole_file = isinstance(self.manifest.files[block.chunk.file], OtherFile)
        return not self._verify or whole_file or block.key in self._verified


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """Tensor of an open checkpoint: a `SavedTensor`."""

    reader: CheckpointReader = field(repr=False)
    section: Section
    name: str

    @property
    def shape(self) -> Shape:
        """Returns the shape of the whole tensor."""
        return self.reader.shape(self.section, self.name)

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype of the saved tensor."""
        return self.reader.dtype(self.section, self.name)

    def read(self) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        return self.reader.read(self.section, self.name)

    def read_into(self, region: Region, target: Tensor) -> None:
        """Fills `target`, on any device, with a region of the tensor; see `Reader.read_into`."""
        self.reader.read_into(self.section, self.name, region, target)


class _Spare(threading.local):
    """Memory for a block, and bytes that were read ahead; separate for each thread."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.file, self.start, self.ahead = "", 0, bytearray()  # bytes of a file from `start` on


class _Block(NamedTuple):
    """Block of a file with its own hash."""

    chunk: Chunk
    number: int
    begin: int  # in the file
    nbytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.chunk.file, self.chunk.entry, self.number


def _arranged(shape: Shape, region: Simple, target: Tensor) -> tuple[Simple, Tensor]:
    """Returns region and target in matching forms: a range with a 1-d target, or a box with a target of its size."""
    form = normal(shape, region)
    assert not isinstance(form, BoxList)
    if target.numel() != form.numel:
        raise ValueError(f"{region} has {form.numel} elements, and the target has {target.numel()}")
    if isinstance(form, FlatRange):
        if target.is_contiguous():
            return form, line(target)
        if target.ndim == 1:
            return form, target
        form = region if isinstance(region, Box) else Box((0,) * len(shape), shape)
    if tuple(target.shape) != form.size:
        raise ValueError(f"the target has the shape {list(target.shape)}, which does not match {region}")
    return form, target
