"""Reading, trusting and verifying what a checkpoint says it contains, without torch."""

import hashlib
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
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
from ddpforge.checkpoint.untrusted import BLOCK, DTYPES, Claim, PlainFile, damaged
from ddpforge.errors import CheckpointError
from ddpforge.interfaces.regions import flaw, held_shape, normal, whole
from ddpforge.recipe.toml import loads

_DEEPEST = 16  # levels of JSON

_Model = TypeVar("_Model", bound=BaseModel)


class _Header(BaseModel):
    format: str
    version: int


# ---------------------------------------------------------------------------------------------- reading
def read_manifest(path: Path, *, verify: bool = False) -> Manifest:
    """The manifest of the checkpoint `path`, after checking that it is committed and has all its files.

    Costs a look at each file's size, or, with `verify`, a read of every byte. Raises CheckpointError naming
    what is missing, damaged or too new.
    """
    manifest = read_sealed(path)
    check_files(path, manifest)
    if verify:
        check_meaning(path, manifest)
        verify_contents(path, manifest)
    return manifest


def check_meaning(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError for what no run writes, though its form is right: a manifest may come from anybody."""
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
    """The manifest, after checking that it is the one that was committed; the other files are not looked at."""
    return parse_manifest(path, sealed(path)[0])


def sealed(path: Path) -> tuple[bytearray, str]:
    """The manifest's text and sha256, after checking that it is the one that was committed."""
    commit = parse(Commit, path / COMMIT, read_text(path / COMMIT))
    content = read_text(path / MANIFEST)
    digest = hashlib.sha256(content).hexdigest()
    if digest != commit.manifest_sha256:
        raise damaged(path / MANIFEST, f"its sha256 is not the one that {COMMIT} names")
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
    """The contents of a JSON file that may be anything."""
    file = PlainFile(path)
    if file.size > MOST_TEXT:
        raise damaged(path, f"it has {file.size} bytes, more than any file of its kind")
    return file.read(0, file.size)


def parse(model: type[_Model], path: Path, content: bytes | bytearray) -> _Model:
    """The JSON object in a file."""
    return untrusted.parse(TypeAdapter(model), path, content)


# ---------------------------------------------------------------------------------------------- checking
def check_files(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless all files are there with their sizes, and every tensor is in one of them."""
    for name, entry in manifest.files.items():
        check_size(path / name, entry)
    check_listed(path, manifest)


def check_size(path: Path, entry: FileEntry) -> None:
    """Raises CheckpointError unless the file is there and as long as it was."""
    if (size := untrusted.size_of(path)) != entry.bytes:
        raise damaged(path, f"it has {size} bytes, and the manifest says {entry.bytes}")


def check_listed(path: Path, manifest: Manifest) -> None:
    """Raises CheckpointError unless every tensor is in files that the manifest lists."""
    for section in manifest.tensors.values():
        for name, tensor in section.items():
            for chunk in tensor.chunks:
                if chunk.file not in manifest.files:
                    raise damaged(path / MANIFEST, f"it puts {name} in the file {chunk.file!r}, which it does not list")


class Placed(NamedTuple):
    """An entry of a safetensors file: the chunk that it is, and of which tensor."""

    tensor: TensorEntry
    chunk: Chunk

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk's contents."""
        return self.chunk.region.numel * DTYPES[self.tensor.dtype].itemsize

    @property
    def claim(self) -> Claim:
        """The claim that the file's header must agree with."""
        return Claim(self.tensor.dtype, held_shape(self.tensor.shape, self.chunk.region))


@untrusted.uncollected()
def layout(manifest: Manifest) -> dict[str, dict[str, Placed]]:
    """Lists the entries of each safetensors file.

    Raises ValueError unless every tensor is there exactly once, and no larger than the files that it is in.
    """
    found: dict[str, dict[str, Placed]] = defaultdict(dict)
    for section, tensors in manifest.tensors.items():
        for name, tensor in tensors.items():
            if problem := _problem(manifest, tensor):
                raise ValueError(f"{name} ({section}): {problem}")
            for chunk in tensor.chunks:
                placed = Placed(tensor, chunk)
                if found[chunk.file].setdefault(chunk.entry, placed) is not placed:
                    raise ValueError(f"{name} ({section}) and another are both {chunk.entry} of {chunk.file}")

    for file, entries in found.items():
        if sum(placed.nbytes for placed in entries.values()) > (size := manifest.files[file].bytes):
            raise ValueError(f"{file} cannot hold all that is said to be in its {size} bytes")
    return found


def _problem(manifest: Manifest, tensor: TensorEntry) -> object:
    """Describes the flaw of an entry; something false if it has none."""
    if tensor.dtype not in DTYPES:
        return f"there is no type {tensor.dtype!r}"
    for chunk in tensor.chunks:
        whole_file = isinstance(manifest.files[chunk.file], OtherFile)
        hashes = 0 if whole_file else -(-Placed(tensor, chunk).nbytes // BLOCK)
        if normal(tensor.shape, chunk.region) != chunk.region or len(chunk.hashes) != hashes:
            return f"{chunk.entry} of {chunk.file} is not as ddpforge writes it"
    if [chunk.region for chunk in tensor.chunks] == [whole(tensor.shape)]:
        return None
    return flaw(tensor.shape, [chunk.region for chunk in tensor.chunks])


def layout_of(path: Path, manifest: Manifest) -> dict[str, dict[str, Placed]]:
    """The `layout` of the checkpoint `path`; raises CheckpointError naming the manifest."""
    try:
        return layout(manifest)
    except ValueError as error:
        raise damaged(path / MANIFEST, str(error)) from error


def verify_contents(path: Path, manifest: Manifest, *, rank: int = 0, ranks: int = 1) -> None:
    """Raises CheckpointError unless every byte of the files is the one that was written.

    With `ranks`, looks at every so many-th block only: `ranks` ranks together look at all.
    """
    found, begin = layout_of(path, manifest), 0
    for file, entry in manifest.files.items():
        placed = found.get(file, {})
        blocks = max(1, sum(len(one.chunk.hashes) for one in placed.values()))
        mine = range((rank - begin) % ranks, blocks, ranks)
        if mine:
            verify_file(path / file, entry, placed, mine)
        begin += blocks


def verify_file(path: Path, entry: FileEntry, placed: Mapping[str, Placed], blocks: range = range(sys.maxsize)) -> None:
    """Raises CheckpointError unless the bytes of one file, or those of some of its `blocks`, are those written."""
    if isinstance(entry, OtherFile):
        check_sha256(path, entry)
        return
    file = PlainFile(path)
    begins = untrusted.places(file, claims_of(placed), entry.header_xxh3)
    buffer = memoryview(bytearray(min(BLOCK, entry.bytes)))
    first = 0
    for name, chunk in placed.items():
        numbers = [number for number in range(len(chunk.chunk.hashes)) if first + number in blocks]
        _verify_blocks(file, begins[name], chunk, numbers, buffer)
        first += len(chunk.chunk.hashes)


def claims_of(entries: Mapping[str, Placed]) -> dict[str, Claim]:
    """The manifest's claims about the entries of one file."""
    return {name: placed.claim for name, placed in entries.items()}


def check_sha256(path: Path, entry: OtherFile) -> None:
    """Raises CheckpointError unless the file is the one that was written."""
    try:
        digest = disk.sha256(path)
    except OSError as error:
        raise damaged(path, f"it cannot be read ({error.strerror})") from error
    if digest != entry.sha256:
        raise damaged(path, "its sha256 is not the one in the manifest")


def _verify_blocks(file: PlainFile, begin: int, placed: Placed, numbers: Iterable[int], buffer: memoryview) -> None:
    for number in numbers:
        start = number * BLOCK
        block = buffer[: min(BLOCK, placed.nbytes - start)]
        read_block(file, begin + start, placed.chunk, number, block)
        disk.proceed()


def read_block(file: PlainFile, begin: int, chunk: Chunk, number: int, buffer: memoryview) -> None:
    """Fills `buffer` with a chunk's block; raises CheckpointError unless it has the hash that the manifest says."""
    digest = disk.xxh3()
    file.read_into(begin, buffer, digest.update)
    if digest.hexdigest() != chunk.hashes[number]:
        raise damaged(file.path, f"the contents of {chunk.entry} are not those that were written (block {number})")


# ---------------------------------------------------------------------------------------------- every byte
class Damage(NamedTuple):
    """A file of a checkpoint that is missing, or not what was written."""

    file: str
    problem: str


def damages(path: Path) -> list[Damage]:
    """All damage to the checkpoint `path`; nothing when it is intact to the last byte.

    Where the manifest itself cannot be trusted nothing is known of the other files, so that is all there is to say.
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
    """The error's message, without the name of the file."""
    return error.message.rpartition(" is damaged: ")[2]
