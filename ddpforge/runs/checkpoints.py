"""Finds a checkpoint of a run (by step, the best, or the newest intact one), and lists and describes checkpoints."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from pydantic import ValidationError

from ddpforge.checkpoint import retention
from ddpforge.checkpoint.schema import COMMIT, FOLDER, MANIFEST, SECTIONS, Manifest, Number
from ddpforge.checkpoint.untrusted import DTYPES
from ddpforge.errors import CheckpointError, SetupError, UsageError
from ddpforge.recipe.schema import KeepSection
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import read_evaluations

__all__ = ["CheckpointFolder", "choose", "find", "is_checkpoint", "keep_of", "parse"]

log = logging.getLogger("ddpforge")


# ---------------------------------------------------------------------------------------------- of a run
def keep_of(folder: RunFolder) -> KeepSection:
    """Returns the `checkpoint.keep` section of a run's recipe."""
    try:
        return KeepSection.model_validate(folder.tables().get("checkpoint", {}).get("keep", {}))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise SetupError(f"checkpoint.keep in {folder.resolved} cannot be read: {reason}") from error


def choose(folder: RunFolder, *, step: int | None = None, best: bool = False) -> Path:
    """Returns the checkpoint of `step`, the best one by `checkpoint.keep.monitor`, or the newest intact one.

    Raises UsageError if there is no such checkpoint; the error lists the existing ones.
    """
    if best and step is not None:
        raise UsageError("--best and --step exclude each other", hints=["give one of them"])

    if not best and step is None:
        path, skipped = retention.newest(folder.checkpoints)
        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is not None:
            return path

    found, _ = retention.committed(folder.checkpoints, evaluated=read_evaluations(folder.path))
    if best:
        keep = keep_of(folder)
        chosen = retention.best(found, keep)
        problem = f"no checkpoint of {folder.path} has a finite {keep.monitor}"
        if keep.monitor is None:
            problem = (
                f"no metric ranks the checkpoints: the recipe of {folder.path} does not set checkpoint.keep.monitor"
            )
    elif step is not None:
        chosen = [each for each in found if each.manifest.step == step]
        problem = f"{folder.path} has no checkpoint of step {step}"
    else:
        chosen, problem = [], f"{folder.path} has no intact checkpoint"

    if not chosen:
        steps = ", ".join(str(each.manifest.step) for each in reversed(found))
        raise UsageError(problem, hints=[f"it has checkpoints of step {steps or 'none'}"])
    return chosen[0].path


# ---------------------------------------------------------------------------------------------- of any folder
@dataclass(frozen=True)
class CheckpointFolder:
    """Folder of checkpoints: that of a run, or one without a run, as `ckpt import` makes."""

    folder: Path
    run: RunFolder | None

    @classmethod
    def find(cls, source: str) -> CheckpointFolder:
        """Finds the checkpoints of a run (its folder, or its name in runs/), or those in a plain folder.

        Raises UsageError if `source` is neither.
        """
        path = Path(source)
        if not RunFolder(path).exists() and any(path.glob("step-*")):
            return cls(path, None)
        run = RunFolder.find(source)
        retention.check_folder(run.checkpoints)
        return cls(run.checkpoints, run)

    def keep(self) -> KeepSection:
        """Returns the `checkpoint.keep` section of the run's recipe; the defaults without a run."""
        return KeepSection() if self.run is None else keep_of(self.run)

    def choose(
        self, *, step: int | None = None, best: bool = False, intact: bool = False, strict: bool = False
    ) -> Path:
        """Returns the checkpoint of `step`, the best one, or the newest; with `intact`, the newest intact one.

        A newer checkpoint that is visibly broken is skipped with a warning; with `strict` it raises CheckpointError.
        Raises UsageError if there is no such checkpoint.
        """
        if self.run is not None and (best or intact):
            return choose(self.run, step=step, best=best)
        if best:
            raise UsageError(
                f"{self.folder} is not a run: no recipe names a metric for --best", hints=["choose by --step"]
            )

        found, broken = retention.committed(self.folder)
        chosen = [each for each in found if step in (None, each.manifest.step)]
        if not chosen:
            steps = ", ".join(str(each.manifest.step) for each in reversed(found)) or "none"
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            hints = [f"it has checkpoints of step {steps}", *(f"broken: {reason}" for _, reason in broken[:3])]
            raise UsageError(f"{self.folder} has {what}", hints=hints)
        newer = [reason for path, reason in broken if step is None and _step(path) > chosen[0].manifest.step]
        if newer and strict:
            hint = f"choose one with --step: the newest unbroken one is of step {chosen[0].manifest.step}"
            raise CheckpointError(newer[0], hints=[hint])
        for reason in newer:
            log.warning("passed over: %s", reason)
        return chosen[0].path


def _step(path: Path) -> int:
    """Returns the step in a checkpoint's folder name; -1 for any other name."""
    match = FOLDER.fullmatch(path.name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """True if `path` is the folder of one checkpoint, even a broken one."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or (path / COMMIT).is_file() or FOLDER.fullmatch(path.resolve().name) is not None


def find(
    source: str, *, step: int | None = None, best: bool = False, intact: bool = False, strict: bool = False
) -> Path:
    """Returns `source` if it is a checkpoint, else one of its checkpoints; see `CheckpointFolder.choose`."""
    if is_checkpoint(path := Path(source)):
        if best or step is not None:
            raise UsageError(
                f"{source} is a single checkpoint, but --step and --best choose among those of a run",
                hints=["remove these options, or name the run"],
            )
        return path
    return CheckpointFolder.find(source).choose(step=step, best=best, intact=intact, strict=strict)


def parse(text: str) -> Path:
    """Returns the checkpoint for "RUN", "RUN:STEP", "RUN:best", or a checkpoint's folder."""
    source, colon, which = text.rpartition(":")
    if Path(text).exists() or not colon:
        return find(text, strict=True)
    if which == "best":
        return find(source, best=True)
    if not which.isdecimal():
        raise UsageError(f"{text}: {which!r} is neither a step nor `best`", hints=["e.g. digits:207 or digits:best"])
    return find(source, step=int(which))


# ---------------------------------------------------------------------------------------------- lists

_MOST_METRICS = 3  # columns of a list


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """Row of a checkpoint list. A broken checkpoint has only `path`, `bytes` and `problem`."""

    path: Path
    bytes: int
    problem: str | None = None
    step: int | None = None
    samples: int | None = None
    created: str | None = None
    strategy: str | None = None
    world_size: int | None = None
    layout: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    latest: bool = False
    best: bool = False


def rows(place: CheckpointFolder) -> list[CheckpointRow]:
    """Returns all checkpoints, newest first, then the broken ones. Compares file sizes, but reads no tensor files."""
    evaluated = read_evaluations(place.run.path) if place.run else {}
    found, broken = retention.committed(place.folder, evaluated=evaluated)
    best = retention.best(found, place.keep())[:1]
    whole = [
        CheckpointRow(
            path=each.path,
            bytes=_size(each.path),
            step=each.manifest.step,
            samples=each.manifest.samples,
            created=each.manifest.created,
            strategy=each.manifest.strategy,
            world_size=each.manifest.world_size,
            layout=layout_name(each.manifest),
            metrics=metrics(each.manifest),
            latest=each is found[0],
            best=each in best,
        )
        for each in found
    ]
    return whole + [
        CheckpointRow(path=path, bytes=_size(path), problem=reason) for path, reason in sorted(broken, reverse=True)
    ]


def newest_first(place: CheckpointFolder) -> list[Path]:
    """Returns all checkpoints in the order in which a resume tries them; broken ones are sorted by their name."""
    found, broken = retention.committed(place.folder)
    order: list[tuple[float, str, Path]] = [(each.manifest.step, each.manifest.created, each.path) for each in found]
    order += [(float(match[1]) if (match := FOLDER.fullmatch(path.name)) else math.inf, "", path) for path, _ in broken]
    return [path for *_, path in sorted(order, reverse=True)]


def _size(path: Path) -> int:
    """Returns the bytes of the files in a folder, or of a file; 0 for a link."""
    if path.is_symlink():
        return 0
    return sum(file.lstat().st_size for file in path.glob("*")) if path.is_dir() else path.lstat().st_size


def layout_name(manifest: Manifest) -> str:
    """Returns "sharded" if each rank wrote its own shard, or "full" if one file has the whole model."""
    shards = any(name.startswith("shard-") for name in manifest.files)
    return "full" if "model.safetensors" in manifest.files or not shards else "sharded"


def metrics(manifest: Manifest) -> dict[str, float | None]:
    """Returns the metrics for JSON: None for a value that is not finite."""
    values = {name: manifest.metric(name) for name in manifest.metrics}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def notable(found: Sequence[CheckpointRow], keep: KeepSection) -> list[str]:
    """Returns the metrics for a list's columns: the one in `keep.by`, then those of the evaluation."""
    names = list(dict.fromkeys(name for row in found for name in row.metrics))
    names = [*([keep.monitor] if keep.monitor in names else []), *(name for name in names if name.startswith("eval/"))]
    return list(dict.fromkeys(names))[:_MOST_METRICS]


# ---------------------------------------------------------------------------------------------- contents of one
@dataclass(frozen=True, kw_only=True)
class Tensor:
    """Tensor, as the manifest describes it."""

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: int
    bytes: int


def tensors(manifest: Manifest) -> list[Tensor]:
    """Returns all tensors by section, sorted by name."""
    return [
        Tensor(
            section=section,
            name=name,
            shape=entry.shape,
            dtype=entry.dtype,
            parts=len(entry.chunks),
            bytes=prod(entry.shape) * DTYPES[entry.dtype].itemsize if entry.dtype in DTYPES else 0,
        )
        for section in SECTIONS
        for name, entry in sorted(manifest.tensors.get(section, {}).items(), key=lambda each: _natural(each[0]))
    ]


def _natural(name: str) -> list[str | int]:
    """Returns a sort key that puts layers.9 before layers.10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def totals(manifest: Manifest) -> dict[str, dict[str, object]]:
    """Returns for each section the number of tensors, elements and bytes, and the number of tensors by dtype."""
    found: dict[str, dict[str, object]] = {}
    for section in SECTIONS:
        mine = [tensor for tensor in tensors(manifest) if tensor.section == section]
        dtypes = sorted({tensor.dtype for tensor in mine})
        found[section] = {
            "tensors": len(mine),
            "elements": sum(prod(tensor.shape) for tensor in mine),
            "bytes": sum(tensor.bytes for tensor in mine),
            "dtypes": {dtype: sum(tensor.dtype == dtype for tensor in mine) for dtype in dtypes},
        }
    return found


def describe(path: Path, manifest: Manifest) -> dict[str, object]:
    """Returns the facts of a checkpoint for JSON. Tensors are counted, not listed."""
    recipe = manifest.recipe
    return {
        "path": str(path),
        "format": manifest.version,
        "layout": layout_name(manifest),
        "step": manifest.step,
        "samples": manifest.samples,
        "created": manifest.created,
        "strategy": manifest.strategy,
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "metrics": metrics(manifest),
        "position": manifest.position,
        "loop": manifest.loop,
        "lineage": manifest.lineage,
        "recipe": recipe,
        "aliases": manifest.aliases,
        "callbacks": {name: {k: plain(v) for k, v in values.items()} for name, values in manifest.callbacks.items()},
        "files": {name: entry.bytes for name, entry in manifest.files.items()},
        "sections": totals(manifest),
    }


def plain(scalar: object) -> object:
    """Returns a manifest's number without its dtype."""
    return scalar.value if isinstance(scalar, Number) else scalar
