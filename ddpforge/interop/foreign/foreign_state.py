"""The contents of another program's checkpoint, and the little that its files are trusted with."""

import stat
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.interfaces.regions import Part

Held = Tensor | list[Part]
Number = bool | int | float


@dataclass(kw_only=True)
class ForeignState:
    """Tensors by name, as `contents.RankState` takes them; `left_out` says in words what of the source is not there."""

    kind: str
    model: dict[str, Held]
    optimizer: dict[str, dict[str, Held | Number]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    samples: int | None = None
    left_out: list[str] = field(default_factory=list)


def refused(path: Path, reason: object, *hints: str) -> UsageError:
    """The error for a source that is not what it should be."""
    return UsageError(f"{path} cannot be imported: {reason}", hints=hints)


def untrusted(path: Path, what: str) -> UsageError:
    """The error for a pickle that would have to be loaded in full."""
    return refused(
        path,
        f"{what} is a pickle, and loading one can run any code that its maker put there",
        "if you know who made it and trust them, add --trust",
        "if not, ask for safetensors, which cannot run code",
    )


def regular(path: Path) -> Path:
    """The path of a file within a source; raises UsageError for links and for what is no file."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise refused(path, error.strerror or error) from error
    if not stat.S_ISREG(mode):
        hint = "make a copy with regular files: cp -rL SOURCE COPY"
        raise refused(path, "it is a link or a special file, which could lead anywhere", *([hint] * stat.S_ISLNK(mode)))
    return path


def inside(folder: Path, name: object) -> Path:
    """The file that an index calls `name`; raises UsageError where that would lead out of the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise refused(folder, f"it refers to the file {name!r}, which is not the plain name of one of its files")
    return regular(folder / name)


def load(path: Path, *, trust: bool) -> Any:
    """Loads a file of `torch.save`; without `trust` only tensors and plain containers of them."""
    zipped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnpicklingError as error:
        if not trust:
            raise untrusted(path, "it holds more than tensors, so it") from error
    except Exception as error:  # whatever a damaged file makes of the unpickler
        raise refused(path, f"torch.load says {_brief(error)}") from error
    try:
        with redirect_stdout(sys.stderr):  # of the packages that it imports
            return torch.load(path, map_location="cpu", weights_only=False, mmap=zipped)
    except ImportError as error:
        raise refused(path, f"its pickle needs a package that is not installed ({error})") from error
    except Exception as error:
        raise refused(path, f"torch.load says {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def tied(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors that share all of their memory under the first of their names, and the other names as aliases."""
    first: dict[tuple[Any, ...], str] = {}
    kept: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for name, tensor in named.items():
        known = name
        if tensor.layout is torch.strided and tensor.numel():
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
            known = first.setdefault((*place, tensor.dtype), name)
        if known == name:
            kept[name] = tensor
        else:
            aliases[name] = known
    return kept, aliases


def listed(names: Sequence[str], most: int = 6) -> str:
    """The first of several names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
