"""Which checkpoints a folder has, which one to go on from, and which may go. Needs no torch."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ddpforge.checkpoint import files
from ddpforge.checkpoint.manifest import FOLDER, LATEST, Manifest, read_manifest, verify
from ddpforge.errors import CheckpointError
from ddpforge.recipe.schema import KeepSection

_LESS_IS_BETTER = ("loss", "perplexity", "error", "bits", "mae", "mse")


class Found(NamedTuple):
    """A committed checkpoint."""

    path: Path
    manifest: Manifest


def committed(folder: Path) -> tuple[list[Found], list[tuple[Path, str]]]:
    """The complete checkpoints in `folder`, newest first, and the others with what is wrong with each.

    Newer means: of a later step; of the same step, written later. Files' times play no part, since copying a
    folder changes them. Contents are not read; `newest` does that.
    """
    found, broken = [], []
    for path in folder.glob("step-*"):
        try:
            found.append(Found(path, _open(path)))
        except CheckpointError as error:
            broken.append((path, error.message))
    found.sort(key=lambda each: (each.manifest.step, each.manifest.created), reverse=True)
    return found, sorted(broken)


def newest(folder: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest checkpoint of which every byte is intact, and those that were passed over for it, with reasons."""
    found, skipped = committed(folder)
    for path, manifest in found:
        try:
            verify(path, manifest)
        except CheckpointError as error:
            skipped.append((path, error.message))
        else:
            return path, [(other, reason) for other, reason in skipped if _step(other) >= manifest.step]
    return None, skipped


def is_best(metrics: Mapping[str, float], keep: KeepSection, found: list[Found]) -> bool:
    """True when `metrics` beat those of every checkpoint in `found`; a NaN or missing metric never does."""
    if keep.by is None or math.isnan(value := metrics.get(keep.by, math.nan)):
        return False
    return all(_badness(value, keep) < _badness(each.manifest.metric(keep.by), keep) for each in found)


def best(found: list[Found], keep: KeepSection) -> list[Found]:
    """Those of `found` whose metric is known, best first; of equals the newer first."""
    if keep.by is None:
        return []
    known = [each for each in found if not math.isnan(each.manifest.metric(keep.by))]
    return sorted(known, key=lambda each: _badness(each.manifest.metric(keep.by or ""), keep))


def prune(folder: Path, keep: KeepSection) -> list[Path]:
    """Removes the checkpoints that `keep` does not keep, and returns their paths.

    Only complete checkpoints count as kept, so that a broken one never costs an intact one its place; broken ones
    are left for a person to look at. The one that `latest.json` names always stays.
    """
    found, _ = committed(folder)
    kept = {each.path for each in (*found[: keep.last], *best(found, keep)[: keep.best])}
    removed = [each.path for each in found if each.path not in kept and each.path.name != _latest(folder)]
    for path in removed:
        files.discard(path)
    return removed


def clean(folder: Path) -> None:
    """Removes what a killed process left half-written or half-removed; call it before any process writes."""
    for path in (*folder.glob(".*.tmp"), *folder.glob(".trash-*")):
        files.remove(path)


def _open(path: Path) -> Manifest:
    if path.is_symlink() or not FOLDER.fullmatch(path.name):
        raise CheckpointError(f"{path} is not a checkpoint: it is a link, or not named step-<number>-<suffix>")
    manifest = read_manifest(path)
    if manifest.step != _step(path):
        raise CheckpointError(f"{path} is the checkpoint of step {manifest.step}, and its name says otherwise")
    return manifest


def _step(path: Path) -> float:
    match = FOLDER.fullmatch(path.name)
    return int(match[1]) if match else math.inf


def _badness(value: float, keep: KeepSection) -> float:
    """Smaller is better; infinite where the metric is not known."""
    less = any(word in (keep.by or "") for word in _LESS_IS_BETTER) if keep.mode is None else keep.mode == "min"
    return math.inf if math.isnan(value) else value if less else -value


def _latest(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / LATEST).read_bytes())["dir"])
    except (OSError, ValueError, KeyError, TypeError):
        return None     # a hint only: absent before the first save, and anyone may have edited it
