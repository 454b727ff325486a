"""All disk writes of ddpforge, crash-safe sequences of them, and safe access to files from other sources.

The first half has all basic operations. Tests interrupt these seven functions to find all states that a killed process
can leave on disk.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

import xxhash

from ddpforge import disk
from ddpforge.errors import SetupError, UsageError, unexpanded

_STRIDE = 1 << 20  # bytes: small enough to be still in the CPU's cache when they are written after hashing
_MOST_UNSYNCED = 1 << 30  # bytes: a longer sync could not be distinguished from a disk that hangs

_operations = 0


def progress() -> int:
    """Returns a count of this process's writes and verifications; it distinguishes a slow disk from one that hangs."""
    return _operations


def proceed() -> None:
    """Increments the count of `progress`."""
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
    """Waits until the file's contents would survive a power failure."""
    file.flush()
    os.fsync(file.fileno())
    proceed()


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder would survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(old: Path, new: Path) -> None:
    """Renames atomically within one file system; replaces an existing file at `new`."""
    old.rename(new)


def remove(path: Path) -> None:
    """Removes a file, or a folder with its contents; a missing file is not an error."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- sequences
def write_new(path: Path, blocks: Iterable[bytes | memoryview]) -> tuple[int, list[str]]:
    """Writes a new file and waits for the disk; returns its size in bytes and the hash of each block (see `xxh3`)."""
    size, unsynced, hashes = 0, 0, []
    with create(path) as file:
        for block in blocks:
            view = memoryview(block)
            digest = xxh3() if len(view) > _STRIDE else None
            for start in range(0, len(view), _STRIDE):
                piece = view if digest is None else view[start : start + _STRIDE]
                if digest is not None:
                    digest.update(piece)
                write(file, piece)
                unsynced += len(piece)
                if unsynced >= _MOST_UNSYNCED:
                    sync(file)
                    unsynced = 0
            # In one call for a small tensor: a checkpoint may have 100,000 of them.
            hashes.append(xxh3_hex(view) if digest is None else digest.hexdigest())
            size += len(view)
        sync(file)
    return size, hashes


def replace(path: Path, data: bytes, *, waits: bool = True) -> None:
    """Replaces the contents of a small file atomically: also after a crash, it has the old or the new contents.

    Without `waits` this does not hold after a power failure.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    remove(temporary)  # left by a killed process
    if waits:
        write_new(temporary, [data])
    else:
        with create(temporary) as file:
            write(file, data)
    rename(temporary, path)
    if waits:
        sync_folder(path.parent)


def put_away(path: Path) -> Path:
    """Renames a folder before its removal, so that a crash never leaves half of it; returns the new path."""
    trash = path.with_name(f".trash-{path.name.lstrip('.')}")
    rename(path, trash)
    sync_folder(path.parent)
    return trash


def xxh3(data: bytes | bytearray | memoryview = b"") -> xxhash.xxh3_128:
    """Returns an XXH3-128 hash object: it detects damage at the speed of memory, but it does not detect forgery."""
    return xxhash.xxh3_128(data)


def xxh3_hex(data: bytes | bytearray | memoryview) -> str:
    """Returns the XXH3-128 of data in one call, as text: three times as fast for a small tensor."""
    return xxhash.xxh3_128_hexdigest(data)


def sha256(path: Path) -> str:
    """Returns the sha256 of a file's contents; raises OSError for a link."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---------------------------------------------------------------------------------------------- files of other origin
_FLAGS = {
    "rb": os.O_RDONLY,
    "r+b": os.O_RDWR,
    "ab": os.O_WRONLY | os.O_APPEND | os.O_CREAT,
    "a+b": os.O_RDWR | os.O_APPEND | os.O_CREAT,
}


class NotPlain(OSError):
    """Raised for a path that is not a regular file."""


def plain_size(path: Path) -> int:
    """Returns the bytes of a regular file; raises NotPlain for anything else."""
    # A link could lead to any file, and reading a pipe or a device may never end.
    return _reject_odd(path.lstat())


def is_plain(path: Path) -> bool:
    """True if `path` is a regular file, and not a link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def open_plain(
    path: Path, mode: Literal["rb", "r+b", "ab", "a+b"] = "rb", *, within: Path | None = None, buffering: int = -1
) -> Any:
    """Opens a regular file; raises OSError, without blocking, for a link, a pipe, a device or a folder.

    With `within`, also raises if a folder between `within` and the file is a link.
    """
    if within is not None:
        reject_linked_folders(path.parent, within)
    try:
        plain_size(path)  # checked first, because opening a device may have effects
    except FileNotFoundError:
        if not _FLAGS[mode] & os.O_CREAT:
            raise
    descriptor = os.open(path, _FLAGS[mode] | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    try:
        _reject_odd(os.fstat(descriptor))
        return os.fdopen(descriptor, mode, buffering)
    except BaseException:
        os.close(descriptor)
        raise


def read_plain(path: Path, most: int, *, within: Path | None = None) -> bytes:
    """Reads a regular file; raises OSError as `open_plain` does, or if it has more than `most` bytes."""
    with open_plain(path, within=within) as file:
        content: bytes = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes")
    return content


def reject_linked_folders(folder: Path, within: Path) -> None:
    """Raises OSError if a path from `within` to `folder` is a link or no folder; missing folders are not errors."""
    way = within
    for part in folder.relative_to(within).parts:
        way = way / part
        try:
            mode = way.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(mode):
            raise OSError(errno.ENOTDIR, f"{way} is a link, or no folder")


def odd_entries(folder: Path, *, deep: bool) -> Iterator[Path]:
    """Yields entries of a folder that are neither regular files nor folders; with `deep`, also those of subfolders."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in found:
        if entry.is_dir(follow_symlinks=False):
            if deep:
                yield from odd_entries(Path(entry.path), deep=True)
        elif not entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _reject_odd(status: os.stat_result) -> int:
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a link or a special file"
        raise NotPlain(errno.EINVAL, f"it is {kind}, not a regular file")
    return status.st_size


# ---------------------------------------------------------------------------------------------- whole files
def reject_existing(out: Path, *, force: bool) -> None:
    """Raises UsageError if the folder of `out` is missing, or if `out` exists; `force` allows an existing file."""
    if not out.parent.is_dir():
        hints = unexpanded(out.parent) or [f"mkdir -p {out.parent}"]
        raise UsageError(f"there is no folder {out.parent}", hints=hints)
    if out.is_dir() or (out.exists() and not force):
        raise UsageError(f"{out} exists", hints=["choose another file with --out, or replace it with --force"])


@contextmanager
def appearing(out: Path, error: type[SetupError] = SetupError) -> Iterator[Path]:
    """Yields a temporary path, and renames it to `out` on success; raises `error` if the disk raises OSError."""
    temporary = out.with_name(
        f".{out.name}.{secrets.token_hex(8)}.tmp{out.suffix}"
    )  # ranks on two machines may write at once
    try:
        yield temporary
        disk.rename(temporary, out)
        disk.sync_folder(out.parent)
    except OSError as refusal:
        raise error(f"{out} could not be written: {refusal.strerror or refusal}") from refusal
    finally:
        with suppress(OSError):
            disk.remove(temporary)
