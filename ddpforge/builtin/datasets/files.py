"""Common to datasets in files: options, the files that a path names, and the libraries that read them."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Callable
from glob import glob
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.errors import EnvironmentProblem, UsageError

__all__ = ["Classes", "Lanes", "Shuffle", "Window", "find_files", "keep", "library", "numeric"]

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

    A pattern has `*`, or braces as "train-{000..099}.tar" (all of which must be there).
    """
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", path):
        raise UsageError(f"path: {path} is an address; only files are read", hints=["copy or mount it first"])
    if "{" in path:
        found = [Path(one) for one in library("braceexpand", "webdataset").braceexpand(path)]
    elif Path(path).is_dir():
        found = sorted(Path(path).glob(f"*{suffix}"))
    else:
        found = sorted(map(Path, glob(path))) if "*" in path else [Path(path)]
    missing = [one for one in found if not one.is_file()]
    if missing or not found:
        what = f"no such file: {missing[0]}" if missing else f"no file matches {path}"
        raise EnvironmentProblem(f"path: {what}", hints=[f"looked in {Path.cwd()}"])
    return found


def keep(folder: str | None, name: str, facts: list[Any], find: Callable[[], NDArray[np.int64]]) -> NDArray[np.int64]:
    """The numbers that `find` finds in a file, or what `folder` keeps of them for the same `facts`."""
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
    found: NDArray[np.int64] = np.load(kept, mmap_mode="r")
    return found
