"""Safe access to the files of another program's checkpoint."""

import stat
import sys
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.interfaces.regions import TensorShard

Held = Tensor | list[TensorShard]
Number = bool | int | float


def rejected(path: Path, reason: object, *hints: str) -> UsageError:
    """Returns the error for a source that cannot be imported."""
    return UsageError(f"{path} cannot be imported: {reason}", hints=hints)


def untrusted(path: Path, what: str) -> UsageError:
    """Returns the error for a pickle that cannot be loaded as bare tensors."""
    return rejected(
        path,
        f"{what} is a pickle, and loading it can run any code of its author",
        "add --trust if you know and trust its author",
        "otherwise obtain the weights as safetensors, which cannot run code",
    )


def regular(path: Path) -> Path:
    """Returns the path of a file in a source; raises UsageError if it is missing, a link or not a regular file."""
    try:
        mode = path.lstat().st_mode
    except OSError as error:
        raise rejected(path, error.strerror or error) from error
    if not stat.S_ISREG(mode):
        hint = "make a copy with regular files: cp -rL SOURCE COPY"
        raise rejected(path, "it is a link or a special file, not a regular file", *([hint] * stat.S_ISLNK(mode)))
    return path


def inside(folder: Path, name: object) -> Path:
    """Returns the path of the file `name` in a folder; raises UsageError if `name` could lead out of the folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or Path(name).name != name or "\0" in name:
        raise rejected(folder, f"it refers to the file {name!r}, which is not a plain file name")
    return regular(folder / name)


def load(path: Path, *, trust: bool) -> Any:
    """Loads a file of `torch.save`; without `trust` only tensors and plain containers of tensors.

    Raises UsageError for any other content, and for a file that cannot be loaded.
    """
    zipped = zipfile.is_zipfile(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except UnpicklingError as error:
        if not trust:
            raise untrusted(path, "it contains objects other than tensors; it") from error
    except Exception as error:  # a damaged file can make the unpickler raise anything
        raise rejected(path, f"torch.load failed: {_brief(error)}") from error
    try:
        with redirect_stdout(sys.stderr):  # the output of packages that the pickle imports
            return torch.load(path, map_location="cpu", weights_only=False, mmap=zipped)
    except ImportError as error:
        raise rejected(path, f"its pickle needs a package that is not installed ({error})") from error
    except Exception as error:
        raise rejected(path, f"torch.load failed: {_brief(error)}") from error


def _brief(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def tied(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns tensors and aliases: tensors that share all of their memory are kept under the first of their names."""
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
    """Joins the first `most` names, and adds the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
