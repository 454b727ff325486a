"""Finds the checkpoint that somebody means: of a run, by its step, the best, or the newest that is intact."""

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
from ddpforge.errors import CheckpointError, EnvironmentProblem, UsageError
from ddpforge.recipe.schema import KeepSection
from ddpforge.runs.folder import RunFolder

__all__ = ["CheckpointFolder", "choose", "find", "is_checkpoint", "keep_of", "parse"]

log = logging.getLogger("ddpforge")


# ---------------------------------------------------------------------------------------------- of a run
def keep_of(folder: RunFolder) -> KeepSection:
    """The `checkpoint.keep` of a run's recipe."""
    try:
        return KeepSection.model_validate(folder.tables().get("checkpoint", {}).get("keep", {}))
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise EnvironmentProblem(f"checkpoint.keep in {folder.resolved} cannot be read: {reason}") from error


def choose(folder: RunFolder, *, step: int | None = None, best: bool = False) -> Path:
    """The checkpoint of `step`, the best by `checkpoint.keep.monitor`, or the newest intact one.

    Raises UsageError when there is no such checkpoint; it names those that there are.
    """
    if best and step is not None:
        raise UsageError("--best and --step each choose a checkpoint", hints=["give one of them"])

    if not best and step is None:
        path, skipped = retention.newest(folder.checkpoints)
        for _, reason in skipped:
            log.warning("passed over: %s", reason)
        if path is not None:
            return path

    found, _ = retention.committed(folder.checkpoints)
    if best:
        keep = keep_of(folder)
        chosen = retention.best(found, keep)
        problem = f"no checkpoint of {folder.path} has a finite {keep.monitor}"
        if keep.monitor is None:
            problem = (
                f"no metric decides what is best: the recipe of {folder.path} does not set checkpoint.keep.monitor"
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
    """A folder of checkpoints: a run's, or one that stands by itself, as `ckpt import` makes them."""

    folder: Path
    run: RunFolder | None

    @classmethod
    def find(cls, source: str) -> CheckpointFolder:
        """The checkpoints of a run (its folder, or its name in runs/), or those in a folder.

        Raises UsageError when there is nothing like that.
        """
        path = Path(source)
        if not RunFolder(path).exists() and any(path.glob("step-*")):
            return cls(path, None)
        run = RunFolder.find(source)
        retention.check_folder(run.checkpoints)
        return cls(run.checkpoints, run)

    def keep(self) -> KeepSection:
        """The `checkpoint.keep` of the run's recipe."""
        return KeepSection() if self.run is None else keep_of(self.run)

    def choose(
        self, *, step: int | None = None, best: bool = False, intact: bool = False, strict: bool = False
    ) -> Path:
        """The checkpoint of `step`, the best one, or the newest; with `intact`, the newest that is intact.

        A newer one that is visibly broken is passed over with a warning; where `strict`, it is a CheckpointError.
        Raises UsageError when there is none.
        """
        if self.run is not None and (best or intact):
            return choose(self.run, step=step, best=best)
        if best:
            raise UsageError(f"{self.folder} is not a run, so no recipe says what is best", hints=["choose by --step"])

        found, broken = retention.committed(self.folder)
        chosen = [each for each in found if step in (None, each.manifest.step)]
        if not chosen:
            steps = ", ".join(str(each.manifest.step) for each in reversed(found)) or "none"
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            hints = [f"it has checkpoints of step {steps}", *(f"broken: {reason}" for _, reason in broken[:3])]
            raise UsageError(f"{self.folder} has {what}", hints=hints)
        newer = [reason for path, reason in broken if step is None and _step(path) > chosen[0].manifest.step]
        if newer and strict:
            hint = f"choose one by its step: the newest that is not broken is of step {chosen[0].manifest.step}"
            raise CheckpointError(newer[0], hints=[hint])
        for reason in newer:
            log.warning("passed over: %s", reason)
        return chosen[0].path


def _step(path: Path) -> int:
    """The step that a checkpoint's name says; -1 where it is no such name."""
    match = FOLDER.fullmatch(path.name)
    return int(match[1]) if match else -1


def is_checkpoint(path: Path) -> bool:
    """True for the folder of one checkpoint, however broken."""
    if not path.is_dir():
        return False
    return (path / MANIFEST).is_file() or (path / COMMIT).is_file() or FOLDER.fullmatch(path.resolve().name) is not None


def find(
    source: str, *, step: int | None = None, best: bool = False, intact: bool = False, strict: bool = False
) -> Path:
    """The checkpoint that is meant: `source` itself, or one of those of a run; see `CheckpointFolder.choose`."""
    if is_checkpoint(path := Path(source)):
        if best or step is not None:
            raise UsageError(
                f"{source} is a checkpoint, and --step and --best choose one among several",
                hints=["leave them out, or name the run"],
            )
        return path
    return CheckpointFolder.find(source).choose(step=step, best=best, intact=intact, strict=strict)


def parse(text: str) -> Path:
    """The checkpoint that "RUN", "RUN:STEP", "RUN:best" or a checkpoint's folder means."""
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
class Row:
    """A checkpoint in a list; of a broken one only the path, the bytes and what is wrong are known."""

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


def rows(place: CheckpointFolder) -> list[Row]:
    """All checkpoints, newest first, then those that are broken. Files are not read; their sizes are compared."""
    found, broken = retention.committed(place.folder)
    best = retention.best(found, place.keep())[:1]
    whole = [
        Row(
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
    return whole + [Row(path=path, bytes=_size(path), problem=reason) for path, reason in sorted(broken, reverse=True)]


def newest_first(place: CheckpointFolder) -> list[Path]:
    """All checkpoints in the order in which resuming would try them; those without a manifest come by their name."""
    found, broken = retention.committed(place.folder)
    order: list[tuple[float, str, Path]] = [(each.manifest.step, each.manifest.created, each.path) for each in found]
    order += [(float(match[1]) if (match := FOLDER.fullmatch(path.name)) else math.inf, "", path) for path, _ in broken]
    return [path for *_, path in sorted(order, reverse=True)]


def _size(path: Path) -> int:
    """Bytes of the files in a folder; none of a link, wherever it leads."""
    if path.is_symlink():
        return 0
    return sum(file.lstat().st_size for file in path.glob("*")) if path.is_dir() else path.lstat().st_size


def layout_name(manifest: Manifest) -> str:
    """Names a checkpoint's layout: "sharded" if ranks wrote what they hold, "full" if one file has the model (too)."""
    shards = any(name.startswith("shard-") for name in manifest.files)
    return "full" if "model.safetensors" in manifest.files or not shards else "sharded"


def metrics(manifest: Manifest) -> dict[str, float | None]:
    """Metrics as JSON holds them: null where one is not finite."""
    values = {name: manifest.metric(name) for name in manifest.metrics}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def notable(found: Sequence[Row], keep: KeepSection) -> list[str]:
    """The metrics that a list has room for: the one that decides what is best, then those of the evaluation."""
    names = list(dict.fromkeys(name for row in found for name in row.metrics))
    names = [*([keep.monitor] if keep.monitor in names else []), *(name for name in names if name.startswith("eval/"))]
    return list(dict.fromkeys(names))[:_MOST_METRICS]


# ---------------------------------------------------------------------------------------------- what is in one
@dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor, as the manifest describes it."""

    section: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: int
    bytes: int


def tensors(manifest: Manifest) -> list[Tensor]:
    """All tensors by section, in the order of their names."""
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
    """Sorts layers.9 before layers.10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"([0-9]+)", name)]


def totals(manifest: Manifest) -> dict[str, dict[str, object]]:
    """By section: how many tensors and elements, their bytes, and how many tensors there are of each dtype."""
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
    """Everything about a checkpoint that fits on a page, as JSON holds it; tensors are counted, not listed."""
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
    """A number of a manifest without its dtype."""
    return scalar.value if isinstance(scalar, Number) else scalar
