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
from ddpforge.checkpoint.contents import CALLBACKS, OPTIMIZER, SHARED, Facts, Plain, facts_of, unflatten
from ddpforge.checkpoint.manifest import check_sha256, claims_of, layout_of, read_block, read_manifest
from ddpforge.checkpoint.safetensors_writer import dtype_name, line
from ddpforge.checkpoint.schema import MANIFEST, Chunk, Manifest, OtherFile, Section, TensorEntry, TensorFile
from ddpforge.checkpoint.untrusted import BLOCK, PlainFile, damaged
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, SavedTensor
from ddpforge.interfaces.regions import (
    Box,
    Pieces,
    Range,
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

_MOST_OPEN = 64  # files: a checkpoint may have more than a process may open

T = TypeVar("T")


class Reader:
    """An open checkpoint, of any format and layout.

    With `verify`, every block of a file (64 MiB) that a read touches is checked against its hash, once. Beside what
    it fills, the reader needs memory for one block in each thread that reads. Everything raises CheckpointError naming
    the file that is missing, damaged, not what the manifest says, or too new.
    """

    def __init__(self, path: Path, *, verify: bool = True, manifest: Manifest | None = None) -> None:
        self.path = path
        self.manifest = manifest or read_manifest(path)
        self._verify = verify
        self._layout = layout_of(path, self.manifest)
        self._begins: dict[str, dict[str, int]] = {}  # of each entry, in the files that were opened
        self._verified: set[tuple[str, str, int]] = set()  # file, entry, number of the block
        self._opening = threading.Lock()
        self._files = lru_cache(_MOST_OPEN)(PlainFile)  # one that is dropped is closed after the last read of it
        self._spare = _Spare()

    # -- beside tensors
    @property
    def facts(self) -> Facts:
        """The checkpoint's facts about its run."""
        return facts_of(self.manifest)

    @property
    def aliases(self) -> dict[str, str]:
        """The further names of tied parameters, and under which name each is stored."""
        return self.manifest.aliases

    def state(self) -> CanonicalState[SavedTensor]:
        """The model and its optimizer; tensors are unread."""
        optimizer = self._guarded(lambda: unflatten(self.manifest.optimizer, self._saved("optimizer"), OPTIMIZER))
        # No number of an optimizer is a string: the manifest was read strictly.
        numbers = cast(Mapping[str, Mapping[str, SavedTensor | Tensor | int | float | bool | None]], optimizer)
        shared = numbers.get(SHARED, {})
        owned = {owner: entry for owner, entry in numbers.items() if owner != SHARED}
        return CanonicalState(
            model=self._saved("model"),
            optimizer=owned,
            aliases=self.aliases,
            shared=shared,
            numbers=cast(Mapping[str, int | float], self.manifest.loop),
        )

    def callbacks(self) -> dict[str, dict[str, SavedTensor | Plain]]:
        """The state of callbacks by name and key; tensors are unread."""
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
        """The section's tensors: "<parameter>", "<parameter>/<key>" of the optimizer, "<callback>/<key>"."""
        return list(self.manifest.tensors.get(section, {}))

    def shape(self, section: Section, name: str) -> Shape:
        """The shape of the whole tensor."""
        return self._entry(section, name).shape

    def dtype(self, section: Section, name: str) -> torch.dtype:
        """The dtype that the tensor was saved in."""
        return cast(torch.dtype, getattr(torch, self._entry(section, name).dtype))

    def read(self, section: Section, name: str) -> Tensor:
        """The whole tensor, on the CPU."""
        entry = self._entry(section, name)
        for chunk in entry.chunks:
            self._open(chunk.file)  # before memory is taken on the manifest's word
        tensor = torch.empty(entry.shape, dtype=self.dtype(section, name))
        self.read_into(section, name, whole(entry.shape), tensor)
        return tensor

    def read_into(self, section: Section, name: str, region: Region, target: Tensor) -> None:
        """Fills `target`, on any device, with a region of a tensor; it has the tensor's dtype and the region's size.

        Boxes and pieces are read into a tensor of their own size, a range into one whose elements, in row-major order,
        it becomes.
        """
        for simple, part in pieces(region, target):
            self._read_simple(section, name, simple, part)

    def _read_simple(self, section: Section, name: str, region: Simple, target: Tensor) -> None:
        entry = self._entry(section, name)
        if (found := dtype_name(target.dtype)) != entry.dtype:
            raise CheckpointError(f"{name} ({section}) of {self.path} is {entry.dtype}, and is to be read into {found}")
        try:
            region, target = _arranged(entry.shape, region, target.detach())
        except ValueError as error:
            raise CheckpointError(f"{name} ({section}) of {self.path} cannot be read like this: {error}") from error

        filled = sum(self._read_chunk(entry, chunk, region, target) for chunk in entry.chunks)
        if filled != region.numel:
            raise damaged(self.path / MANIFEST, f"{filled} of {region.numel} numbers of {name} ({section}) are there")

    def finish(self) -> None:
        """Verifies the files that no tensor was read from, and closes all.

        After every tensor was read, every byte is verified.
        """
        if self._verify:
            for file in self.manifest.files.keys() - self._begins.keys():
                self._open(file)
        self.close()

    def close(self) -> None:
        """Closes all files, which take their place on the disk until then, removed or not; reads open them again."""
        self._files.cache_clear()

    def _entry(self, section: Section, name: str) -> TensorEntry:
        try:
            return self.manifest.tensors[section][name]
        except KeyError:
            raise CheckpointError(f"the checkpoint {self.path} has no tensor {name} ({section})") from None

    def _open(self, file: str) -> dict[str, int]:
        """Checks a file's header; returns the offset of each entry."""
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
        return self._files(self.path / name)

    # -- from a file into a tensor
    def _read_chunk(self, entry: TensorEntry, chunk: Chunk, region: Simple, target: Tensor) -> int:
        """Copies what a chunk has of the region into the target; returns the number of elements."""
        shape, source = entry.shape, chunk.region
        if not overlaps(shape, source, region):
            return 0
        if source == region and target.is_contiguous():  # both have the same order: boxes do not matter
            shape, target = (region.numel,), line(target)
            source = region = whole(shape)

        filled, step = 0, BLOCK // target.itemsize
        begin = self._open(chunk.file)[chunk.entry]
        for number, start in enumerate(range(0, source.numel, step)):
            stop = min(start + step, source.numel)
            block = _Block(chunk, number, begin + number * BLOCK, (stop - start) * target.itemsize)
            parts = split(source, start, stop)
            if isinstance(source, Range) and isinstance(region, Range):
                filled += self._read_range(block, Range(source.start + start, source.start + stop), region, target)
            elif any(overlaps(shape, part, region) for part, _ in parts):
                held = self._load(block, target.dtype)
                for part, at in parts:
                    piece = held[at - start : at - start + part.numel]
                    piece = piece.view(part.size) if isinstance(part, Box) else piece
                    filled += copy(shape, part, piece, region, target)
        return filled

    def _read_range(self, block: "_Block", held: Range, region: Range, target: Tensor) -> int:
        """Reads straight into the target where that is possible."""
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
        """All of a block, until this thread loads the next."""
        if len(self._spare.memory) < block.nbytes:
            self._spare.memory = torch.empty(block.nbytes, dtype=torch.uint8)
        loaded = self._spare.memory[: block.nbytes]
        self._fill(block, loaded, 0)
        return loaded.view(dtype)

    def _fill(self, block: "_Block", memory: Tensor, skip: int) -> None:
        """Fills memory with the bytes of a block behind the first `skip`."""
        view = memoryview(memory.view(torch.uint8).numpy().data)
        file = self._file(block.chunk.file)
        if self._known(block):
            file.read_into(block.begin + skip, view)
        else:
            read_block(file, block.begin, block.chunk, block.number, view)
            self._verified.add(block.key)

    def _known(self, block: "_Block") -> bool:
        """True when the block's hash need not be checked (again)."""
        whole_file = isinstance(self.manifest.files[block.chunk.file], OtherFile)
        return not self._verify or whole_file or block.key in self._verified


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A tensor of an open checkpoint: a `SavedTensor`."""

    reader: Reader = field(repr=False)
    section: Section
    name: str

    @property
    def shape(self) -> Shape:
        """The shape of the whole tensor."""
        return self.reader.shape(self.section, self.name)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that it was saved in."""
        return self.reader.dtype(self.section, self.name)

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""
        return self.reader.read(self.section, self.name)

    def read_into(self, region: Region, target: Tensor) -> None:
        """Fills `target`, on any device, with a region of the tensor."""
        self.reader.read_into(self.section, self.name, region, target)


class _Spare(threading.local):
    """Memory for a block, of each thread its own."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)


class _Block(NamedTuple):
    """A stretch of a file that has a hash of its own."""

    chunk: Chunk
    number: int
    begin: int  # in the file
    nbytes: int

    @property
    def key(self) -> tuple[str, str, int]:
        return self.chunk.file, self.chunk.entry, self.number


def _arranged(shape: Shape, region: Simple, target: Tensor) -> tuple[Simple, Tensor]:
    """The same in a form in which a range goes with a line of elements, and a box with a tensor of its size."""
    form = normal(shape, region)
    assert not isinstance(form, Pieces)
    if target.numel() != form.numel:
        raise ValueError(f"{region} is {form.numel} numbers, and the target holds {target.numel()}")
    if isinstance(form, Range):
        if target.is_contiguous():
            return form, line(target)
        if target.ndim == 1:
            return form, target
        form = region if isinstance(region, Box) else Box((0,) * len(shape), shape)
    if tuple(target.shape) != form.size:
        raise ValueError(f"the target has the shape {list(target.shape)}, which is not that of {region}")
    return form, target
