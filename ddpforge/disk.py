"""Every operation that changes a disk, and the few sequences of them that survive a crash.

The first half is the whole vocabulary: to know what a killed process can leave behind, interrupt these seven
functions and no others. The tests do.
"""

import hashlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import xxhash

_STRIDE = 1 << 20  # bytes: what was just hashed is still in the processor's cache when it is written
_MOST_UNSYNCED = 1 << 30  # bytes: a sync of more may take longer than anybody can tell from a disk that hangs

_operations = 0


def progress() -> int:
    """Grows whenever this process wrote or verified something: what tells a slow disk from one that hangs."""
    return _operations


def proceed() -> None:
    """Notes that something was done."""
    global _operations
    _operations += 1


# ---------------------------------------------------------------------------------------------- operations
def make_folder(path: Path) -> None:
    """Creates one folder that must not exist."""
    path.mkdir()


def create(path: Path) -> BinaryIO:
    """Opens a file for writing that must not exist."""
    return path.open("xb")


def write(file: BinaryIO, data: bytes | memoryview) -> None:
    """Appends all of `data`."""
    file.write(data)
    proceed()


def sync(file: BinaryIO) -> None:
    """Waits until the file's contents would survive a power cut."""
    file.flush()
    os.fsync(file.fileno())
    proceed()


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder would survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Moves within one file system, in one instant; an existing file at `new` is replaced."""
    old.rename(new)


def remove(path: Path) -> None:
    """Removes a file, or a folder with everything in it; what is gone already is no error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- sequences
def write_new(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[int, list[str]]:
    """Writes a new file and waits for the disk; returns its size in bytes and the hash of each block, see `xxh3`."""
    size, unsynced, hashes = 0, 0, []
    with create(path) as file:
        for block in blocks:
            digest, view = xxh3(), memoryview(block)
            for start in range(0, len(view), _STRIDE):
                piece = view[start : start + _STRIDE]
                digest.update(piece)
                write(file, piece)
                unsynced += len(piece)
                if unsynced >= _MOST_UNSYNCED:
                    sync(file)
                    unsynced = 0
            hashes.append(digest.hexdigest())
            size += len(view)
        sync(file)
    return size, hashes


def replace(path: Path, data: bytes, *, waits: bool = True) -> None:
    """Gives a small file new contents; a reader sees the old ones or the new ones, also after a crash.

    Where it does not wait for the disk, that is not so after a power cut.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)  # of an attempt that was killed here
    if waits:
        write_new(temporary, [data])
    else:
        with create(temporary) as file:
            write(file, data)
    rename(temporary, path)
    if waits:
        sync_folder(path.parent)


def put_away(path: Path) -> Path:
    """The folder under another name, to be removed; a crash leaves garbage, never half a folder of its own name."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}")
    rename(path, trash)
    sync_folder(path.parent)
    return trash


def xxh3(data: bytes | bytearray | memoryview = b"") -> xxhash.xxh3_128:
    """The XXH3-128 of data, which can be updated by more: finds all damage at the speed of memory, but no forgery."""
    return xxhash.xxh3_128(data)


def sha256(path: Path) -> str:
    """The sha256 of a file's contents; raises OSError for a link."""
    with open(path, "rb", opener=_no_links) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _no_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)
