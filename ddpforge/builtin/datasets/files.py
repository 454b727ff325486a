"""Common to datasets in files: options, the files that a path names, and the libraries that read them."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator
from glob import glob
from importlib import import_module
from itertools import islice, pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "IMAGE_FORMATS",
    "Classes",
    "InBatches",
    "Lanes",
    "Shuffle",
    "Window",
    "find_files",
    "keep",
    "library",
    "numeric",
]

# Pillow goes by an image's content, not by its name, and would hand PostScript, which is a program, to Ghostscript.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "TGA")

_MOST_FILES = 100_000  # that a pattern in braces names: each is looked for

_Number = Annotated[int, Field(ge=1, le=4096)]

Classes = Annotated[int | None, Field(ge=1, description="Number of classes, to compare with the model.")]
Shuffle = Annotated[bool, Field(description="Read the parts (files, row groups, shards) in another order every epoch.")]
Window = Annotated[
    int, Field(ge=1, le=2**20, description="Samples that are read ahead in each lane, and taken in random order.")
]
Lanes = Annotated[
    tuple[_Number, _Number],
    Field(description="Places read at once: in every step, and in turn. They decide which samples form a step."),
]


class InBatches:
    """A map-style dataset whose `__getitems__` returns a whole batch, a tuple of tensors."""

    def __getitem__(self, index: int) -> Any:
        """Returns the parts of one sample."""
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, ids: list[int]) -> Any:
        """Returns the batch of these samples."""
        raise NotImplementedError

    def collate(self, batch: Any) -> Any:
        """Returns its argument: `__getitems__` makes batches already."""
        return batch


def library(name: str, extra: str) -> ModuleType:
    """An optional library, imported; raises EnvironmentProblem that says which extra of ddpforge brings it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise EnvironmentProblem(
            f"{error.name} is not installed", hints=[f"install it: pip install 'ddpforge[{extra}]'"]
        ) from error


def numeric(value: Any) -> Any:
    """A value of a table as `default_collate` takes it: lists and images as arrays; floats as models take them."""
    import numpy as np

    if value is None:
        raise UsageError("columns: a row has no value (null) in one of them", hints=["fill it, or leave the row out"])
    if isinstance(value, float):
        return np.float32(value)
    if not (isinstance(value, list) or hasattr(value, "__array_interface__")):
        return value
    try:
        found = np.asarray(value)
    except ValueError as error:
        raise UsageError(f"columns: a list in one of them is not rectangular: {error}") from error
    if found.dtype == object:
        raise UsageError("columns: a list in one of them holds nulls, or other things than numbers and text")
    return found.astype(np.float32) if found.dtype == np.float64 else found


def find_files(path: str, suffix: str) -> list[Path]:
    """The files that `path` names, sorted: one, those of a folder that end in `suffix`, or those a pattern matches.

    A pattern has `*`, or braces as "train-{000..099}.tar" (all of which must be there), at most 100,000 of them.
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
        raise UsageError(f"path: {path} is an address; only files are read", hints=["copy or mount it first"])
    if "{" in path:
        found = [Path(one) for one in _named(path)]
    elif Path(path).is_dir():
        found = sorted(Path(path).glob(f"*{suffix}"))
    else:
        found = sorted(map(Path, glob(path))) if "*" in path else [Path(path)]
    missing = next((one for one in found if not one.is_file()), None)
    if missing or not found:
        what = f"no such file: {missing}" if missing else f"no file matches {path}"
        raise EnvironmentProblem(f"path: {what}", hints=[f"looked in {Path.cwd()}"])
    return found


def _named(pattern: str) -> list[str]:
    """The names that a pattern in braces stands for; raises UsageError for too many, which would take for ever."""
    if pattern.count("{") > 32 or len(pattern) > 4096:
        raise UsageError("path: more than 32 braces, or 4096 characters", hints=["name a folder, or a pattern with *"])
    names = list(islice(_expanded(pattern), _MOST_FILES + 1))
    if len(names) > _MOST_FILES:
        raise UsageError(
            f"path: {pattern} names more than {_MOST_FILES:,} files",
            hints=["is a range too long? Name a folder, or a pattern with *, for as many"],
        )
    return names


def _expanded(text: str) -> Iterator[str]:
    """As a shell expands braces: {a,b}, {a..c} and {1..3}, with leading zeros and a step; one after the other."""
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
    """The place of the brace that closes this one, and of the commas between its alternatives."""
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
    """The members of a range, as they are needed; None for what is no range."""
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


def keep(folder: str | None, name: str, facts: list[Any], find: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """The numbers that `find` finds in a file, or what `folder` keeps of them for the same `facts`."""
    import numpy as np

    if folder is None:
        return find()
    digest = hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
    kept = Path(folder) / f"{name[:100]}-{digest[:16]}.npy"
    if not kept.is_file():
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentProblem(f"index: {folder} cannot be made a folder: {error}") from error
        draft = kept.with_name(f"{secrets.token_hex(8)}.npy")  # every rank may write one, and it appears whole
        np.save(draft, find())
        draft.rename(kept)
    try:
        found: NDArray[np.int64] = np.load(kept, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise EnvironmentProblem(f"index: {kept} cannot be read: {error}", hints=["remove it"]) from error
    return found
