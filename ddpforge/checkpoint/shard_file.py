"""One safetensors file full of parts of tensors."""

from collections.abc import Mapping
from pathlib import Path

from ddpforge.checkpoint import safetensors_writer
from ddpforge.checkpoint.contents import Held
from ddpforge.checkpoint.safetensors_writer import LazyTensor, dtype_name
from ddpforge.checkpoint.schema import Chunk, Section, TensorEntry, TensorFile, Tensors
from ddpforge.checkpoint.untrusted import uncollected
from ddpforge.interfaces.regions import Box, Part, whole

Entries = dict[tuple[Section, str], list[tuple[str, Part]]]


def nbytes(held: Held) -> int:
    """Bytes of all parts."""
    return sum(part.tensor.nbytes for section in held.values() for parts in section.values() for part in parts)


def write_shard(path: Path, held: Held) -> tuple[TensorFile, Tensors]:
    """Writes the file `path`; returns what a manifest says of it, and of the tensors as far as they are in it.

    A whole tensor is stored under its own name and in its own shape, as other tools expect it.
    """
    entries = _named(held)
    sources = {entry: LazyTensor.of_part(part) for stored in entries.values() for entry, part in stored}
    file, hashes = safetensors_writer.write_file(path, sources)
    return file, _described(held, entries, path.name, hashes)


@uncollected()
def _named(held: Held) -> Entries:
    """The parts that are stored, each under a name of its own."""
    taken = {"__metadata__"}  # means something else in a safetensors file
    return {
        (section, name): [(_unused(_entry_name(name, part), taken), part) for part in parts if _is_stored(part)]
        for section, named in held.items()
        for name, parts in named.items()
    }


@uncollected()
def _described(held: Held, entries: Entries, file: str, hashes: Mapping[str, tuple[str, ...]]) -> Tensors:
    found: Tensors = {section: {} for section in held}
    for (section, name), stored in entries.items():
        first = held[section][name][0]
        chunks = (
            Chunk(file=file, entry=entry, region=part.simple_region, hashes=hashes[entry]) for entry, part in stored
        )
        found[section][name] = TensorEntry(
            dtype=dtype_name(first.tensor.dtype), shape=first.shape, chunks=tuple(chunks)
        )
    return found


def _is_stored(part: Part) -> bool:
    """A part without elements needs no place, unless that is all there is of the tensor."""
    return bool(part.simple_region.numel) or part.region == whole(part.shape)


def _entry_name(name: str, part: Part) -> str:
    """The tensor's own name, or for a part of it one that says which."""
    region = part.simple_region
    if region == whole(part.shape):
        return name
    if isinstance(region, Box):
        sides = (f"{begin}:{begin + count}" for begin, count in zip(region.offset, region.size, strict=True))
        return f"{name}[{','.join(sides)}]"
    return f"{name}[flat {region.start}:{region.stop}]"


def _unused(name: str, taken: set[str]) -> str:
    """The name, or one like it that no other entry has; from now on it is taken."""
    while name in taken:
        name += "'"
    taken.add(name)
    return name
