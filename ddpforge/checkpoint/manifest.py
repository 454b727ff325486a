"""Reads and checks the manifest of a checkpoint, and verifies its files against it. Needs no torch."""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, TypeAdapter

from ddpforge import disk
from ddpforge.checkpoint import untrusted
from ddpforge.checkpoint.schema import (
    COMMIT,
    FORMAT,
    MANIFEST,
    MOST_TEXT,
    VERSION,
    Chunk,
    Commit,
    FileEntry,
    FirstManifest,
    Manifest,
    OtherFile,
    TensorEntry,
    position_flaw,
)
from ddpforge.checkpoint.untrusted import BLOCK, DTYPES, Claim, Damaged, PlainFile, damaged
from ddpforge.errors import CheckpointError
from ddpforge.interfaces.regions import find_gap, held_shape, normal, whole
from ddpforge.recipe.toml import loads

_DEEPEST = 16  # levels of JSON

_Model = TypeVar("_Model", bound=BaseModel)


class _Header(BaseModel):
    format: str
    version: int


# ---------------------------------------------------------------------------------------------- reading
def read_manifest(path: Path, *, verify: bool = False) -> Manifest:
    """Returns the manifest of the checkpoint `path`, after a check that it is committed and has all its files.

    Reads only the size of each file; with `verify`, every byte. Raises CheckpointError with the name of the file if
    one is missing or damaged, or if the format is too new.
    """
    manifest = read_sealed(path)
    check_files(path, manifest)
    if verify:
        check_meaning(path, manifest)
        verify_contents(path, manifest)
    return manifest


def check_meaning(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for values that no run writes. A manifest of another origin may hold them."""
    flaw = position_flaw(manifest.position)
    for name in ("position", "loop", "lineage", "data"):
        if flaw is None and _depth(getattr(manifest, name)) > _DEEPEST:
            flaw = f"{name} is nested too deeply"
    for name, value in manifest.loop.items():
        if flaw is None and type(value) not in (int, float):
            flaw = f"loop.{name} is not a number"
    try:
        loads(manifest.recipe)
        for name in manifest.metrics:
            manifest.metric(name)
    except ValueError as error:
        flaw = flaw or f"its recipe or its metrics cannot be read: {error}"
    if flaw:
        raise damaged(path / MANIFEST, flaw)


def _depth(value: object) -> int:
    """Counts how deeply arrays and objects are nested, without recursion."""
    depth, level = 0, [value]
    while level and depth <= _DEEPEST:
        inner = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [item for items in inner for item in items]
        depth += bool(inner)
        if not inner:
            break
    return depth


def read_sealed(path: Path) -> Manifest:
    """Returns the manifest, after a check that COMMIT has its hash; reads no other files."""
    return parse_manifest(path, sealed(path)[0])


def sealed(path: Path) -> tuple[bytearray, str]:
    """Returns the manifest's text and sha256, after a check that COMMIT has this hash."""
    commit = parse(Commit, path / COMMIT, read_text(path / COMMIT))
    content = read_text(path / MANIFEST)
    digest = hashlib.sha256(content).hexdigest()
    if digest != commit.manifest_sha256:
        raise damaged(path / MANIFEST, f"its sha256 is not the one in {COMMIT}")
    return content, digest


def parse_manifest(path: Path, content: bytes | bytearray) -> Manifest:
    """Parses a manifest in any format that this version knows."""
    header = parse(_Header, path / MANIFEST, content)
    if header.format != FORMAT:
        raise CheckpointError(f"{path} is not a ddpforge checkpoint: its format is {header.format!r}")
    if header.version > VERSION:
        raise CheckpointError(
            f"{path} has checkpoint format {header.version}; this ddpforge reads formats up to {VERSION}",
            hints=["upgrade ddpforge"],
        )
    if header.version == 1:
        return parse(FirstManifest, path / MANIFEST, content).upgraded()
    return parse(Manifest, path / MANIFEST, content)


def read_text(path: Path) -> bytearray:
    """Reads an untrusted JSON file; raises CheckpointError if it is too large."""
    file = PlainFile(path)
    if file.size > MOST_TEXT:
        raise damaged(path, f"it has {file.size} bytes, too many for a file of its kind")
    return file.read(0, file.size)


def parse(model: type[_Model], path: Path, content: bytes | bytearray) -> _Model:
    """Parses the content of the JSON file `path`, strictly; raises CheckpointError if it does not fit `model`."""
    return untrusted.parse(TypeAdapter(model), path, content)


# ---------------------------------------------------------------------------------------------- checking
def check_files(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless all files exist with the right size, and contain all tensors."""
    for name, entry in manifest.files.items():
        check_size(path / name, entry)
    check_listed(path, manifest)


def check_size(path: Path, entry: FileEntry) -> None:
    """Raises CheckpointError unless the file exists with the size in its entry."""
    if (size := untrusted.size_of(path)) != entry.bytes:
        raise damaged(path, f"it has {size} bytes; the manifest lists {entry.bytes}")


def check_listed(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless every tensor is in files that the manifest lists."""
    for section in manifest.tensors.values():
        for name, tensor in section.items():
            for chunk in tensor.chunks:
                if chunk.file not in manifest.files:
                    raise damaged(path / MANIFEST, f"it puts {name} in the file {chunk.file!r}, which it does not list")


class FileEntryOf(NamedTuple):
    """Entry of a safetensors file: its chunk, and the tensor of that chunk."""

    tensor: TensorEntry
    chunk: Chunk

    @property
    def nbytes(self) -> int:
        """Returns the size of the chunk's contents in bytes."""
        return self.chunk.region.numel * DTYPES[self.tensor.dtype].itemsize

    @property
    def claim(self) -> Claim:
        """Returns the dtype and shape that the file's header must have for this entry."""
        return Claim(self.tensor.dtype, held_shape(self.tensor.shape, self.chunk.region))


@untrusted.uncollected()
def layout(manifest: Manifest) -> dict[str, dict[str, FileEntryOf]]:
    """Lists the entries of each safetensors file.

    Raises ValueError unless the chunks of every tensor cover it exactly once, and fit into their files.
    """
    found: dict[str, dict[str, FileEntryOf]] = defaultdict(dict)
    sizes: dict[str, int] = defaultdict(int)
    unhashed = {file for file, entry in manifest.files.items() if isinstance(entry, OtherFile)}
    for section, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            if problem := _problem(tensor, unhashed):
                raise ValueError(f"{name} ({section}): {problem}")
            for chunk in tensor.chunks:
                placed = FileEntryOf(tensor, chunk)
                sizes[chunk.file] += placed.nbytes
                if found[chunk.file].setdefault(chunk.entry, placed) is not placed:
                    raise ValueError(f"{name} ({section}) and another share the entry {chunk.entry} of {chunk.file}")

    for file, needed in sizes.items():
        if needed > (size := manifest.files[file].bytes):
            raise ValueError(f"{file} has {size} bytes: too few for its entries")
    return found


def _problem(tensor: TensorEntry, unhashed: Collection[str]) -> object:
    """Describes the flaw of an entry; returns a false value if there is none."""
    if tensor.dtype not in DTYPES:
        return f"unknown dtype {tensor.dtype!r}"
    itemsize = DTYPES[tensor.dtype].itemsize
    for chunk in tensor.chunks:
        hashes = 0 if chunk.file in unhashed else -(-chunk.region.numel * itemsize // BLOCK)
        if normal(tensor.shape, chunk.region) != chunk.region or len(chunk.hashes) != hashes:
            return f"{chunk.entry} of {chunk.file} has a region or hashes that ddpforge does not write"
    if len(tensor.chunks) == 1 and tensor.chunks[0].region == whole(tensor.shape):
        return None
    return find_gap(tensor.shape, [chunk.region for chunk in tensor.chunks])


def layout_of(path: Path, manifest: Manifest) -> dict[str, dict[str, FileEntryOf]]:
    """Returns the `layout` of the checkpoint `path`; raises CheckpointError if the manifest is flawed."""
    try:
        return layout(manifest)
    except ValueError as error:
        raise damaged(path / MANIFEST, str(error)) from error


def verify_contents(path: Path, manifest: Manifest, *, rank: int = 0, ranks: int = 1) -> None:
    """Raises CheckpointError unless every byte of the files is as written.

    With `ranks`, verifies only every `ranks`-th block, starting at block `rank`: all ranks together verify all blocks.
    """
    found, begin = layout_of(path, manifest), 0
    for file, entry in manifest.files.items():
        placed = found.get(file, {})
        blocks = max(1, sum(len(one.chunk.hashes) for one in placed.values()))
        mine = range((rank - begin) % ranks, blocks, ranks)
        if mine:
            verify_file(path / file, entry, placed, mine)
        begin += blocks


def verify_file(
    path: Path, entry: FileEntry, placed: Mapping[str, FileEntryOf], blocks: range = range(sys.maxsize)
) -> None:
    """Raises CheckpointError unless the bytes of one file, or of its `blocks` with these numbers, are as written."""
    if isinstance(entry, OtherFile):
        check_sha256(path, entry)
        return
    file = PlainFile(path)
    begins = untrusted.places(file, claims_of(placed), entry.header_xxh3)
    buffer = memoryview(bytearray(min(BLOCK, entry.bytes)))
    first = 0
    for name, chunk in placed.items():
        numbers = [number for number in range(len(chunk.chunk.hashes)) if first + number in blocks]
        for number in numbers:
            start = number * BLOCK
            block = buffer[: min(BLOCK, chunk.nbytes - start)]
            read_block(file, begins[name] + start, chunk.chunk, number, block)
            disk.proceed()
        first += len(chunk.chunk.hashes)


def claims_of(entries: Mapping[str, FileEntryOf]) -> dict[str, Claim]:
    """Returns the dtype and shape that the manifest lists for each entry of one file."""
    return {name: placed.claim for name, placed in entries.items()}


def check_sha256(path: Path, entry: OtherFile) -> None:
    """Raises CheckpointError unless the file has the sha256 of its entry."""
    try:
        digest = disk.sha256(path)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if digest != entry.sha256:
        raise damaged(path, "its sha256 is not the one in the manifest")


def read_block(file: PlainFile, begin: int, chunk: Chunk, number: int, buffer: memoryview) -> None:
    """Fills `buffer` with a chunk's block; raises CheckpointError unless it has the hash in the manifest."""
    digest = disk.xxh3()
    file.read_into(begin, buffer, digest.update)
    if digest.hexdigest() != chunk.hashes[number]:
        raise altered(file.path, chunk, number)


def altered(path: Path, chunk: Chunk, number: int) -> Damaged:
    """Returns the error for a chunk's block in the file `path` that has another hash than in the manifest."""
    return damaged(path, f"the contents of {chunk.entry} are not as written (block {number})")


# ---------------------------------------------------------------------------------------------- every byte
class Damage(NamedTuple):
    """File of a checkpoint that is missing or damaged."""

    file: str
    problem: str


def damages(path: Path) -> list[Damage]:
    """Returns all damage to the checkpoint `path`; empty if every byte is intact.

    If the manifest itself is damaged, returns only that, because the other files cannot be checked without it.
    """
    try:
        manifest = read_sealed(path)
        check_listed(path, manifest)
        found = layout_of(path, manifest)
        check_meaning(path, manifest)
    except CheckpointError as error:
        return [Damage(COMMIT if str(path / COMMIT) in error.message else MANIFEST, _reason(error))]

    problems = []
    for file, entry in manifest.files.items():
        try:
            check_size(path / file, entry)
            verify_file(path / file, entry, found.get(file, {}))
        except CheckpointError as error:
            problems.append(Damage(file, _reason(error)))
    return problems


def _reason(error: CheckpointError) -> str:
    """Returns the error's message without the name of the file."""
    return error.message.rpartition(" is damaged: ")[2]
