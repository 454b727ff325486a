"""Lists checkpoints, and describes each by its manifest. Needs no torch."""

import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from ddpforge.checkpoint import retention
from ddpforge.checkpoint.schema import FOLDER, SECTIONS, Manifest, Number
from ddpforge.checkpoint.untrusted import DTYPES
from ddpforge.recipe.schema import KeepSection
from ddpforge.runs.checkpoints import CheckpointFolder

log = logging.getLogger("ddpforge")

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
    names = [*([keep.by] if keep.by in names else []), *(name for name in names if name.startswith("eval/"))]
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
