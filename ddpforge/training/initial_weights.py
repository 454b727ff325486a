"""Loads initial weights (`checkpoint.init_from`) into a model, and reports tensors without a counterpart."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import Tensor

from ddpforge.checkpoint.formats import named_format, weights_format
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.schema import MANIFEST
from ddpforge.errors import UsageError
from ddpforge.interfaces import Ranks, Region, SavedTensor, TensorShard
from ddpforge.interfaces.regions import copy_from
from ddpforge.interfaces.state import PACKED
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.runs.checkpoints import choose
from ddpforge.runs.folder import RunFolder

__all__ = ["find_initial", "in_dtype", "load_initial"]

log = logging.getLogger("ddpforge")

_SHOWN = 8  # names at most in a list
_KEY = "checkpoint.init_from"
_BASE = ".base_layer"  # of a layer with adapters of peft


def load_initial(
    source: str,
    held: Mapping[str, Tensor | TensorShard],
    aliases: Mapping[str, str],
    take: Callable[[Mapping[str, SavedTensor]], None],
    ranks: Ranks,
    *,
    key: str = _KEY,
    skip: Sequence[str] = (),
    whole: bool = False,
) -> None:
    """Calls `take` with the tensors of `source` that a module has; called on every rank.

    `take` reads the tensors of this rank; it also receives the tensors that only other ranks hold. Floating-point
    tensors are converted to the module's dtype. Tensors that `source` lacks, and tensors that match `skip`, keep their
    values. The log lists missing, unused and skipped tensors.

    Args:
        source: a run (its folder, or its name in runs/: the newest checkpoint), a checkpoint, a safetensors file, or a
            folder in which transformers saved a model.
        held: the module's tensors on this rank, or this rank's parts of them, by name.
        aliases: other names of tied tensors.
        take: reads tensors into the module.
        key: recipe key of `source`, for messages.
        skip: globs of tensors that keep their values.
        whole: a missing tensor is an error.

    Raises UsageError if `source` does not exist, no name matches, a glob matches nothing, shapes or kinds of dtypes
    differ, or layers have adapters or are quantized only in one of both.
    """
    path = on_rank_zero(ranks, lambda: find_initial(source, key))
    found = _open(path)
    here = {name: (tuple(mine.shape), _dtype(mine)) for name, mine in held.items()}
    wanted = {name: form for theirs in ranks.all_gather_object(here) for name, form in theirs.items()}
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
        raise UsageError("checkpoint.init_ignore matches all tensors of the model: checkpoint.init_from has no effect")
    if not taken or (whole and missing):
        raise UsageError(
            f"{key} = {json.dumps(source)}: "
            + (f"it lacks {_listed(missing)}" if taken else "none of its tensors has the name of one in the model"),
            hints=[f"it has {_listed(found)}", f"the model has {_listed(wanted)}"],
        )
    _reject_unfit(taken, wanted, key)
    _reject_other_forms(missing, unexpected, f"{key} = {json.dumps(source)}")
    take({name: in_dtype(saved, wanted[name][1]) for name, saved in taken.items()})
    if ranks.is_rank_zero:
        title = "initial weights" if key == _KEY else key
        log.info("%s: %d tensors from %s", title, len(taken), path)
        rest = {"not in it": missing, "not in the model": unexpected, "skipped by init_ignore": skipped}
        for what, names in rest.items():
            if names:
                log.warning("%s: %d tensors %s: %s", title, len(names), what, _listed(names))


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more or "no tensors"


def _dtype(held: Tensor | TensorShard) -> torch.dtype:
    return held.tensor.dtype if isinstance(held, TensorShard) else held.dtype


# ---------------------------------------------------------------------------------------------- sources
def find_initial(source: str, key: str = _KEY) -> Path:
    """Returns the file, folder or checkpoint that `source` names; raises UsageError if it does not exist."""
    path = Path(source).expanduser()
    if path.is_file() or (path / MANIFEST).is_file() or (path.is_dir() and weights_format(path)):
        return path
    try:
        return choose(RunFolder.find(source))
    except UsageError as error:
        raise UsageError(f"{key} = {json.dumps(source)}: {error.message}", hints=error.hints) from error


def _open(path: Path) -> dict[str, SavedTensor]:
    if (path / MANIFEST).is_file():
        return {**CheckpointReader(path).state().model}
    opened = (weights_format(path) or named_format("safetensors")).open(path)
    return {name: _InMemory(one) if isinstance(one, Tensor) else one for name, one in opened.items()}


@dataclass(frozen=True)
class _InMemory:
    """Tensor that a format has read whole."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor

    def read_into(self, region: Region, target: Tensor) -> None:
        copy_from(self.tensor, region, target)


def _reject_unfit(
    taken: Mapping[str, SavedTensor], wanted: Mapping[str, tuple[tuple[int, ...], torch.dtype]], key: str
) -> None:
    unfit = {name: wrong for name, saved in taken.items() if (wrong := _difference(saved, *wanted[name]))}
    if not unfit:
        return
    said = [f"`{name}` is {mine} in the model and {theirs} in {key}" for name, (mine, theirs) in unfit.items()]
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    names = json.dumps(sorted(unfit)) if len(unfit) <= _SHOWN else f"[…], with globs for these {len(unfit)}"
    skip = f"to keep the model's own values: checkpoint.init_ignore = {names}"
    raise UsageError("; ".join(said[:_SHOWN]) + more, hints=[skip] if key == _KEY else [])


def _reject_other_forms(missing: Sequence[str], unexpected: Sequence[str], source: str) -> None:
    """Raises UsageError if layers have adapters or are quantized only here, or only in the source."""
    # Otherwise the model would mix these layers of its own with the other layers of the source.
    theirs = {_plain(name): name for name in unexpected}
    pairs = [(theirs[_plain(name)], name) for name in missing if _plain(name) in theirs]
    if not pairs:
        return
    there, here = min(pairs)
    globs = json.dumps(sorted({re.sub(r"\.\d+\.", ".*.", name) for _, name in pairs}))  # in all blocks
    raise UsageError(
        f"{source}: {len(pairs)} layers have another form than in the model, which would keep its own weights there:"
        f" `{there}` is `{here}` in the model",
        hints=[
            "adapters and quantized layers are made of the weights of the model's constructor, e.g. model.pretrained;"
            " `ddpforge export RUN --merge -o FOLDER` writes weights without adapters",
            f"to keep the model's own values: checkpoint.init_ignore = {globs}",
        ],
    )


def _plain(name: str) -> str:
    """Returns the name that a layer's weight has without adapters and quantization."""
    layer, _, own = name.rpartition(".")
    return f"{layer.removesuffix(_BASE)}.{'weight' if own == PACKED else own}"


def _difference(saved: SavedTensor, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[str, str] | None:
    """Returns the shapes or dtypes of the model's tensor and the saved one if they are incompatible, else None."""
    if tuple(saved.shape) != shape:
        return str(list(shape)), str(list(saved.shape))
    if saved.dtype != dtype and not (saved.dtype.is_floating_point and dtype.is_floating_point):
        return str(dtype).removeprefix("torch."), str(saved.dtype).removeprefix("torch.")
    return None


def in_dtype(saved: SavedTensor, dtype: torch.dtype) -> SavedTensor:
    """Returns the tensor in another dtype; it is converted when it is read."""
    return saved if saved.dtype == dtype else _Converted(saved, dtype)


@dataclass(frozen=True)
class _Converted:
    """Saved tensor that is converted to another dtype when it is read."""

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
