"""Helpers for datasets in files: common options, file patterns, cached indexes."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob
from io import BytesIO
from itertools import islice, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge import disk
from ddpforge.builtin.datasets.listing import listed
from ddpforge.errors import SetupError, UsageError, not_there

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "ClassNames",
    "Classes",
    "InBatches",
    "Labeled",
    "Lanes",
    "Shuffle",
    "Window",
    "find_files",
    "keep",
    "numeric",
    "unknown_class",
]

log = logging.getLogger("ddpforge")

_MOST_FILES = 100_000  # of a pattern in braces, because each file is searched for

_Number = Annotated[int, Field(ge=1, le=4096)]

Classes = Annotated[int | None, Field(ge=1, description="Number of classes, for comparison with the model.")]
ClassNames = Annotated[
    Sequence[str] | None,
    Field(
        min_length=1,
        description="Names of the classes in the order of their numbers; absent: those of the training data, or in the"
        " training data its own.",
    ),
]
Labeled = Annotated[
    bool,
    Field(description="False: samples without targets, the inputs alone, for `ddpforge predict`."),
]
Shuffle = Annotated[
    bool, Field(description="Read the parts (files, row groups, shards) in a different order in every epoch.")
]
Window = Annotated[int, Field(ge=1, le=2**20, description="Size of the shuffle buffer of each lane, in samples.")]
Lanes = Annotated[
    tuple[_Number, _Number],
    Field(description="Lanes per step, and number of lane groups; both influence which samples form a step."),
]


class InBatches:
    """Map-style dataset with a `__getitems__` that returns a whole batch, a tuple of tensors."""

    def __getitem__(self, index: int) -> Any:
        """Returns the parts of one sample."""
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, ids: list[int]) -> Any:
        """Returns the batch of these samples."""
        raise NotImplementedError

    def collate(self, batch: Any) -> Any:
        """Returns its argument, because `__getitems__` already returns batches."""
        return batch


def unknown_class(name: str, names: Sequence[str]) -> str:
    """Describes a class that is not in the names of the classes, for an error message."""
    shown = ", ".join(f"`{one}`" for one in names[:10]) + (" …" if len(names) > 10 else "")
    return f"the class `{name[:60]}` is not one of the training data, or of `class_names`: {shown}"


def numeric(value: Any) -> Any:
    """Converts a value of a table for `default_collate`: lists and images to arrays, floats to float32."""
    import numpy as np

    if value is None:
        raise UsageError("columns: a row has no value (null) in a column", hints=["fill it in, or remove the row"])
    if isinstance(value, float):
        return np.float32(value)
    if not (isinstance(value, list) or hasattr(value, "__array_interface__")):
        return value
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"columns: a list in a column is not rectangular: {error}") from error
    if found.dtype == object:
        raise UsageError("columns: a list in a column contains nulls, or values that are not numbers or strings")
    return found.astype(np.float32) if found.dtype == np.float64 else found


def find_files(path: str, suffix: str) -> list[Path]:
    """Returns the files of `path`, sorted: a file, a folder's files that end in `suffix`, or the matches of a pattern.

    A pattern has `*`, or braces such as "train-{000..099}.tar": at most 100,000 files, which must all exist.

    Raises:
        UsageError: `path` is an address, or has too many or unclosed braces.
        SetupError: A file does not exist, or no file matches.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
        raise UsageError(f"path: {path} is an address, but only files can be read", hints=["copy or mount it first"])
    if "{" in path:
        found = [Path(one) for one in _named(path)]
    elif Path(path).is_dir():
        found = listed(Path(path), (suffix,), cased=True, deep=False)
    else:
        found = sorted(map(Path, glob(path))) if "*" in path else [Path(path)]
    missing = next((one for one in found if not one.is_file()), None)
    if missing or not found:
        what = f"no such file: {missing}" if missing else f"no file matches {path}"
        if not missing and Path(path).is_dir():
            raise SetupError(f"path: no file in the folder {path} ends in {suffix}")
        raise SetupError(f"path: {what}", hints=not_there(missing or path))
    return found


def _named(pattern: str) -> list[str]:
    """Expands a pattern in braces; raises UsageError for too many names."""
    if pattern.count("{") > 32 or len(pattern) > 4096:
        raise UsageError("path: more than 32 braces or 4096 characters", hints=["name a folder, or a pattern with *"])
    names = list(islice(_expanded(pattern), _MOST_FILES + 1))
    if len(names) > _MOST_FILES:
        raise UsageError(
            f"path: {pattern} names more than {_MOST_FILES:,} files",
            hints=["is a range too long? For more files, name a folder, or a pattern with *"],
        )
    return names


def _expanded(text: str) -> Iterator[str]:
    """Yields the expansions of braces as a shell does: {a,b}, {a..c} and {1..3}, with leading zeros and a step."""
    begin = text.find("{")
    if begin < 0:
        yield text
        return
    end, commas = _closing(text, begin)
    ends = [begin, *commas, end]
    inner: Iterable[str] = (text[a + 1 : b] for a, b in pairwise(ends))
    if not commas:
        inner = _range(text[begin + 1 : end]) or [text[begin : end + 1]]
    for each in inner:
        for middle in _expanded(each) if commas else (each,):
            for rest in _expanded(text[end + 1 :]):
                yield f"{text[:begin]}{middle}{rest}"


def _closing(text: str, begin: int) -> tuple[int, list[int]]:
    """Returns the index of the brace that closes the one at `begin`, and of the commas between its alternatives."""
    depth = 0
    commas: list[int] = []
    for place in range(begin, len(text)):
        depth += (text[place] == "{") - (text[place] == "}")
        if not depth:
            return place, commas
        if depth == 1 and text[place] == ",":
            commas.append(place)
    raise UsageError(f"path: a brace in {text} is not closed")


def _range(text: str) -> Iterable[str] | None:
    """Returns an iterator over the members of a range such as 1..3; None if `text` is not a range."""
    if found := re.fullmatch(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.-?(\d{1,18}))?", text, re.ASCII):
        first, last, step = int(found[1]), int(found[2]), int(found[3] or 1) or 1
        zeros = any(re.match(r"-?0\d", one) for one in found.group(1, 2))
        width = max(map(len, found.group(1, 2))) if zeros else 0
        down = last < first
        return (f"{one:0{width}d}" for one in range(first, last + (-1 if down else 1), -step if down else step))
    if found := re.fullmatch(r"([A-Za-z])\.\.([A-Za-z])", text):
        first, last = ord(found[1]), ord(found[2])
        return map(chr, range(first, last + 1) if first <= last else range(first, last - 1, -1))
    return None


# ---------------------------------------------------------------------------------------------- cached indexes
# A cache file is a .npy file with a seal behind the array, which NumPy does not read: the digest of the facts, and the
# checksum of all bytes before it. Files without a seal are of older versions.
_SEAL = re.compile(rb"\nddpforge cache 1 ([0-9a-f]{64}) ([0-9a-f]{32})\n")
_SEAL_BYTES = 18 + 64 + 1 + 32 + 1


def keep(folder: str | None, name: str, facts: list[Any], find: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """Returns the result of `find`, cached in a file of `folder` for the same `facts`.

    A file that is damaged, of other facts, or no regular file is replaced, with a warning.

    Args:
        folder: Folder of the cache; None: no cache.
        name: First part of the cache file's name.
        facts: Values that the result depends on.
        find: Computes the result.

    Raises:
        SetupError: The folder cannot be created, or the cache file cannot be written or read.
    """
    import numpy as np

    if folder is None:
        return find()
    digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
    kept = Path(folder) / f"{name[:100]}-{digest[:16]}.npy"
    try:
        fault = _fault(kept, digest)
    except FileNotFoundError:
        fault = ""
    except OSError as error:
        raise SetupError(f"index: {kept} cannot be read: {error.strerror or error}", hints=["remove it"]) from error
    if fault is not None:
        if fault:
            log.warning("index: %s %s; it is made again", kept, fault)
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SetupError(f"index: the folder {folder} cannot be created: {error}") from error
        found = np.ascontiguousarray(find())
        with disk.appearing(kept) as draft:
            disk.write_new(draft, _sealed(found, digest))
    stored: NDArray[np.int64] = np.load(kept, mmap_mode="r", allow_pickle=False)
    return stored


def _sealed(array: NDArray[Any], digest: str) -> Iterator[bytes | memoryview]:
    """Yields the blocks of a cache file."""
    import numpy as np

    header = BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    data = array.reshape(-1).view(np.uint8).data
    checksum = disk.xxh3(header.getvalue())
    checksum.update(data)
    yield header.getvalue()
    yield data
    yield f"\nddpforge cache 1 {digest} {checksum.hexdigest()}\n".encode()


def _fault(kept: Path, digest: str) -> str | None:
    """Returns the fault of a cache file: None for nothing, an empty text for the format of an older version.

    Raises OSError for a file that is missing or cannot be read.
    """
    checksum = disk.xxh3()
    try:
        with disk.open_plain(kept) as file:
            left = max(os.fstat(file.fileno()).st_size - _SEAL_BYTES, 0)
            file.seek(left)
            seal = _SEAL.fullmatch(file.read())
            if seal is None:
                file.seek(0)
                return "" if _is_array(file) else "is damaged"
            if seal[1] != digest.encode():
                return "is of other data or options"
            file.seek(0)
            while block := file.read(min(1 << 20, left)):
                checksum.update(block)
                left -= len(block)
                disk.proceed()
    except disk.NotPlain as error:
        if kept.is_dir() and not kept.is_symlink():
            raise
        return f"is not a cache file: {error.strerror}"
    return None if checksum.hexdigest().encode() == seal[2] else "is damaged"


def _is_array(file: Any) -> bool:
    """True for a whole .npy file, as older versions wrote it."""
    import numpy as np

    try:
        np.lib.format.read_magic(file)
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    except ValueError:
        return False
    size: int = os.fstat(file.fileno()).st_size
    return bool(size == file.tell() + math.prod(shape) * dtype.itemsize)
