"""Initial weights from elsewhere (`checkpoint.init_from`): what of them a model takes, and what it does not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ddpforge.checkpoint.reader import Reader
from ddpforge.checkpoint.schema import MANIFEST
from ddpforge.errors import CheckpointError, UsageError
from ddpforge.interfaces import Part, Ranks, Region, SavedTensor
from ddpforge.interfaces.regions import Range, copy, pieces
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.runs.checkpoints import choose
from ddpforge.runs.folder import RunFolder

__all__ = ["find_initial", "in_dtype", "load_initial"]

log = logging.getLogger("ddpforge")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"  # as transformers names them
_SHOWN = 8  # names in a list
_KEY = "checkpoint.init_from"


def load_initial(
    source: str,
    held: Mapping[str, Tensor | Part],
    aliases: Mapping[str, str],
    take: Callable[[Mapping[str, SavedTensor]], None],
    ranks: Ranks,
    *,
    key: str = _KEY,
    skip: Sequence[str] = (),
    whole: bool = False,
) -> None:
    """Has `take` read the tensors of `source` that a module has; `held` is what this rank holds of it, by name.

    Called on every rank: each reads what it holds; `take` is given what only others hold, too. `aliases` are further
    names of tied tensors, and `key` is where the recipe says `source`: a run (its folder or its name in runs/: the
    newest checkpoint), a checkpoint, a safetensors file, or a folder in which transformers saved a model. Tensors that
    it lacks, and those that a glob in `skip` names, keep their values; what is missing (an error where it must be
    `whole`) and what is left over goes to the log.
    Floating-point tensors may have another dtype.

    Raises UsageError when there is nothing like that, not one name fits, a glob matches nothing, or shapes or kinds of
    numbers differ: it names all of those.
    """
    path = on_rank_zero(ranks, lambda: find_initial(source, key))
    found = _open(path)
    here = {name: (tuple(mine.shape), _dtype(mine)) for name, mine in held.items()}
    wanted = {name: form for theirs in ranks.everyone(here) for name, form in theirs.items()}
    for alias, name in aliases.items():
        if alias in found:
            found.setdefault(name, found[alias])

    for glob in skip:
        if not any(fnmatchcase(name, glob) for name in wanted):
            raise UsageError(
                f"checkpoint.init_ignore: {json.dumps(glob)} matches no tensor of the model",
                hints=[f"the model has {_listed(wanted)}"],
            )
    skipped = [name for name in wanted if any(fnmatchcase(name, glob) for glob in skip)]
    taken = {name: found[name] for name in wanted if name in found and name not in skipped}
    missing = [name for name in wanted if name not in found and name not in skipped]
    unexpected = [name for name in found if name not in wanted and name not in aliases]
    if skipped and not missing and not taken:
        raise UsageError("checkpoint.init_ignore leaves nothing to take from checkpoint.init_from")
    if not taken or (whole and missing):
        raise UsageError(
            f"{key} = {json.dumps(source)}: "
            + (f"it lacks {_listed(missing)}" if taken else "none of its tensors has a name that the model knows"),
            hints=[f"it has {_listed(found)}", f"the model has {_listed(wanted)}"],
        )
    _refuse_unfit(taken, wanted, key)
    take({name: in_dtype(saved, wanted[name][1]) for name, saved in taken.items()})
    if ranks.is_main:
        _report(path, key, len(taken), {"not in it": missing, "not in the model": unexpected, "left alone": skipped})


def _report(path: Path, key: str, taken: int, rest: Mapping[str, Sequence[str]]) -> None:
    title = "initial weights" if key == _KEY else key
    log.info("%s: %d tensors from %s", title, taken, path)
    for what, names in rest.items():
        if names:
            log.warning("%s: %d tensors %s: %s", title, len(names), what, _listed(names))


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "no tensors"


def _dtype(held: Tensor | Part) -> torch.dtype:
    return held.tensor.dtype if isinstance(held, Part) else held.dtype


# ---------------------------------------------------------------------------------------------- where weights are
def find_initial(source: str, key: str = _KEY) -> Path:
    """The file, folder or checkpoint that `source` means; raises UsageError when there is nothing like that."""
    path = Path(source).expanduser()
    if path.is_file() or any((path / name).is_file() for name in (MANIFEST, _INDEX, _SINGLE)):
        return path
    try:
        return choose(RunFolder.find(source))
    except UsageError as error:
        raise UsageError(f"{key} = {json.dumps(source)}: {error.message}", hints=error.hints) from error


def _open(path: Path) -> dict[str, SavedTensor]:
    if (path / MANIFEST).is_file():
        reader = Reader(path)
        return {**reader.state().model}
    try:
        if not (path / _INDEX).is_file():
            return _of_file(path / _SINGLE if path.is_dir() else path)
        files = set(json.loads((path / _INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        if any(Path(name).name != name for name in files):
            raise CheckpointError(f"{path / _INDEX} names files outside its folder")
        return {name: tensor for file in sorted(files) for name, tensor in _of_file(path / file).items()}
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}",
            hints=["`ddpforge ckpt import` makes a checkpoint of other formats"],
        ) from error


def _of_file(path: Path) -> dict[str, SavedTensor]:
    file: Any = safe_open(path, framework="pt")
    return {name: _InFile(file, name) for name in file.keys()}  # noqa: SIM118 (not a mapping)


@dataclass(frozen=True)
class _InFile:
    """A tensor in a safetensors file, which is mapped into memory."""

    file: Any
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.file.get_slice(self.name).get_shape())

    @cached_property
    def dtype(self) -> torch.dtype:
        return self.read().dtype

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_tensor(self.name)
        return tensor

    def read_into(self, region: Region, target: Tensor) -> None:
        whole = self.read()
        for simple, part in pieces(region, target):
            held = part.view(-1) if isinstance(simple, Range) else part
            copy(self.shape, Range(0, whole.numel()), whole.reshape(-1), simple, held)


def _refuse_unfit(
    taken: Mapping[str, SavedTensor], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], key: str
) -> None:
    unfit = {name: wrong for name, saved in taken.items() if (wrong := _difference(saved, *wanted[name]))}
    if not unfit:
        return
    said = [f"`{name}` is {mine} in the model and {theirs} in {key}" for name, (mine, theirs) in unfit.items()]
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    names = json.dumps(sorted(unfit)) if len(unfit) <= _SHOWN else f"[…], with globs for these {len(unfit)}"
    skip = f"begin with the model's own: checkpoint.init_ignore = {names}"
    raise UsageError("; ".join(said[:_SHOWN]) + more, hints=[skip] if key == _KEY else [])


def _difference(saved: SavedTensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, str] | None:
    """The shapes, or the kinds of numbers, of the model's tensor and the saved one, where they do not go together."""
    if tuple(saved.shape) != shape:
        return str(list(shape)), str(list(saved.shape))
    if saved.dtype != dtype and not (saved.dtype.is_floating_point and dtype.is_floating_point):
        return str(dtype).removeprefix("torch."), str(saved.dtype).removeprefix("torch.")
    return None


def in_dtype(saved: SavedTensor, dtype: torch.dtype) -> SavedTensor:
    """The tensor as one of another dtype, which is converted when it is read."""
    return saved if saved.dtype == dtype else _Converted(saved, dtype)


@dataclass(frozen=True)
class _Converted:
    """A tensor in another dtype than it was saved in."""

    saved: SavedTensor
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.saved.shape

    def read(self) -> Tensor:
        return self.saved.read().to(self.dtype)

    def read_into(self, region: Region, target: Tensor) -> None:
        raw = torch.empty_like(target, dtype=self.saved.dtype)
        self.saved.read_into(region, raw)
        target.detach().copy_(raw)
