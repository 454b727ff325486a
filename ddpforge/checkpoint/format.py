"""A checkpoint in memory, and how all of it or nothing of it reaches the disk."""

import json
import platform
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import NamedTuple, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from ddpforge import __version__
from ddpforge.checkpoint import files, tensors
from ddpforge.checkpoint.manifest import (
    COMMIT,
    LATEST,
    MANIFEST,
    Commit,
    FileEntry,
    Manifest,
    Number,
    Scalar,
    Section,
    TensorEntry,
    damaged,
    read_manifest,
)
from ddpforge.checkpoint.tensors import Value
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState

Contents = Mapping[Section, Mapping[str, Tensor]]
OptimizerState = dict[str, dict[str, Tensor | int | float | bool | None]]


@dataclass(kw_only=True)
class Checkpoint:
    """All that a run needs to go on as if it had never stopped.

    `position` (in the data) and `loop` (loss scale, skipped steps) are JSON. `callbacks` maps a callback's
    name to its state. `recipe` is the resolved recipe's text; `lineage` tells which recipes led here.
    """

    step: int
    samples: int
    state: CanonicalState
    strategy: str
    world_size: int
    recipe: str = ""
    lineage: list[JsonValue] = field(default_factory=list)
    position: dict[str, JsonValue] = field(default_factory=dict)
    loop: dict[str, JsonValue] = field(default_factory=dict)
    callbacks: Mapping[str, Mapping[str, Value]] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- writing
def write(folder: Path, checkpoint: Checkpoint) -> Path:
    """Adds a checkpoint to `folder` and returns its path, which appears complete or not at all.

    Raises CheckpointError when the state holds what cannot be saved, before anything is written, and when the
    disk refuses. The checkpoints that were there are never touched.
    """
    manifest, contents = _describe(checkpoint)
    try:
        return _commit(folder, manifest, contents)
    except OSError as error:
        needed = sum(tensor.nbytes for section in contents.values() for tensor in section.values())
        raise CheckpointError(
            f"the checkpoint of step {checkpoint.step} could not be written to {folder}: "
            f"{error.strerror or error}; it takes {needed:,} bytes and {_free(folder):,} are free",
            hints=["earlier checkpoints are intact: make room, or keep fewer (`checkpoint.keep`), and resume"],
        ) from error


def _describe(checkpoint: Checkpoint) -> tuple[Manifest, Contents]:
    """A manifest that lacks only the files, and the tensors; finds all that can be wrong with the state."""
    state = checkpoint.state
    for name, tensor in state.model.items():
        tensors.check(tensor, f"{name} of the model")
    optimizer, optimizer_scalars = _split(state.optimizer, _OPTIMIZER)
    callbacks, callback_scalars = _split(checkpoint.callbacks, _CALLBACKS)
    contents: Contents = {"model": state.model, "optimizer": optimizer, "callbacks": callbacks}
    versions = {"ddpforge": __version__, "torch": torch.__version__, "python": platform.python_version()}

    try:
        manifest = Manifest(
            step=checkpoint.step,
            samples=checkpoint.samples,
            created=datetime.now(UTC).isoformat(timespec="microseconds"),
            strategy=checkpoint.strategy,
            world_size=checkpoint.world_size,
            versions=versions,
            metrics={
                name: tensors.to_scalar(x, f"the metric {name}", (int, float)) for name, x in checkpoint.metrics.items()
            },
            position=checkpoint.position,
            loop=checkpoint.loop,
            lineage=checkpoint.lineage,
            recipe=checkpoint.recipe,
            aliases=state.aliases,
            optimizer=cast(dict[str, dict[str, Number | bool | int | float | None]], optimizer_scalars),
            callbacks=callback_scalars,
            files={},
            tensors={section: _entries(section, content) for section, content in contents.items()},
        )
        manifest.dumps()
    except ValueError as error:
        raise CheckpointError(f"the checkpoint of step {checkpoint.step} cannot be saved: {error}") from error
    return manifest, contents


class _Kind(NamedTuple):
    """What is peculiar to the optimizer's state and to that of callbacks."""

    what: str  # names a value in an error
    numbers: bool  # 0-d tensors are kept as numbers in the manifest
    plain: tuple[type, ...]  # types that may stand beside tensors
    cut: Callable[[str, str], tuple[str, str, str]]  # takes a tensor's name apart


# A parameter's name may hold slashes, the keys of its state do not; for callbacks it is the other way round.
_OPTIMIZER = _Kind("{1} in the optimizer state of {0}", True, (bool, int, float, NoneType), str.rpartition)
_CALLBACKS = _Kind("{1} in the state of callback {0}", False, (bool, int, float, str, NoneType), str.partition)


def _split(
    owners: Mapping[str, Mapping[str, Value]], kind: _Kind
) -> tuple[dict[str, Tensor], dict[str, dict[str, Scalar]]]:
    """Tensors by "<owner>/<key>", and the rest, which names every owner, even one that has nothing there."""
    found: dict[str, Tensor] = {}
    rest: dict[str, dict[str, Scalar]] = {owner: {} for owner in owners}
    for owner, values in owners.items():
        for key, value in values.items():
            what = kind.what.format(owner, key)
            if isinstance(value, Tensor) and (value.ndim or not kind.numbers):
                tensors.check(value, what)
                found[name := f"{owner}/{key}"] = value
                if kind.cut(name, "/") != (owner, "/", key):
                    raise CheckpointError(f"{what} cannot be saved: its name must not hold a slash")
            else:
                rest[owner][key] = tensors.to_scalar(value, what, kind.plain)
    return found, rest


def _entries(section: Section, content: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(file=_file(section), dtype=tensors.dtype_name(tensor), shape=tuple(tensor.shape))
        for name, tensor in content.items()
    }


def _file(section: Section) -> str:
    return f"{section}.safetensors"


def _commit(folder: Path, manifest: Manifest, contents: Contents) -> Path:
    """The order makes it safe: contents, hashes, name, hint; each on the disk before the next begins."""
    if not folder.is_dir():
        files.make_folder(folder)
        files.sync_folder(folder.parent)

    final = _unused(folder, manifest.step)
    temporary = folder / f".{final.name}.tmp"
    try:
        files.make_folder(temporary)
        _fill(temporary, manifest, contents)
        files.sync_folder(temporary)
        files.rename(temporary, final)
        files.sync_folder(folder)
    except BaseException:
        with suppress(OSError):  # what cannot be removed now is removed when the run starts again
            files.remove(temporary)
        raise

    files.replace(folder / LATEST, json.dumps({"dir": final.name, "step": manifest.step}).encode())
    return final


def _unused(folder: Path, step: int) -> Path:
    """A name for the step that no checkpoint has: saving a step twice must not overwrite the first."""
    while (path := folder / f"step-{step:09d}-{secrets.token_hex(2)}").exists():
        pass
    return path


def _fill(folder: Path, manifest: Manifest, contents: Contents) -> None:
    written = {}
    for section, content in contents.items():
        if content:
            size, digest = files.write_new(folder / _file(section), tensors.encode(content, {"format": "pt"}))
            written[_file(section)] = FileEntry(bytes=size, sha256=digest)

    text = manifest.model_copy(update={"files": written}).dumps()
    _, digest = files.write_new(folder / MANIFEST, [text])
    files.write_new(folder / COMMIT, [Commit(manifest_sha256=digest).model_dump_json().encode()])


def _free(folder: Path) -> int:
    """Bytes left on the disk that holds, or was to hold, the folder."""
    return shutil.disk_usage(next(path for path in (folder, *folder.absolute().parents) if path.exists())).free


# ---------------------------------------------------------------------------------------------- reading
def read(path: Path, *, verify: bool = True) -> Checkpoint:
    """The checkpoint at `path`, every byte of it verified unless `verify` is False; tensors are on the CPU.

    Raises CheckpointError naming the file that is missing, damaged, not what the manifest says, or too new.
    """
    manifest = read_manifest(path, verify=verify)
    optimizer = read_section(path, manifest, "optimizer")
    callbacks = read_section(path, manifest, "callbacks")
    try:
        state = CanonicalState(
            model=read_section(path, manifest, "model"),
            optimizer=cast(OptimizerState, _join(manifest.optimizer, optimizer, _OPTIMIZER)),
            aliases=manifest.aliases,
        )
        callback_state = _join(manifest.callbacks, callbacks, _CALLBACKS)
    except (ValueError, KeyError) as error:
        raise damaged(path / MANIFEST, str(error)) from error

    return Checkpoint(
        step=manifest.step,
        samples=manifest.samples,
        state=state,
        strategy=manifest.strategy,
        world_size=manifest.world_size,
        recipe=manifest.recipe,
        lineage=manifest.lineage,
        position=manifest.position,
        loop=manifest.loop,
        callbacks=callback_state,
        metrics={name: manifest.metric(name) for name in manifest.metrics},
    )


def read_section(path: Path, manifest: Manifest, section: Section) -> dict[str, Tensor]:
    """The tensors of one section, on the CPU."""
    entries = manifest.tensors.get(section, {})
    found: dict[str, Tensor] = {}
    for file in {entry.file: None for entry in entries.values()}:
        found |= tensors.decode(path / file, {name: entry for name, entry in entries.items() if entry.file == file})
    return found


def _join(
    rest: Mapping[str, Mapping[str, Scalar]], found: Mapping[str, Tensor], kind: _Kind
) -> dict[str, dict[str, Value]]:
    """The inverse of `_split`."""
    owners = {o: {key: tensors.from_scalar(x) for key, x in values.items()} for o, values in rest.items()}
    for name, tensor in found.items():
        owner, _, key = kind.cut(name, "/")
        owners[owner][key] = tensor
    return owners
