"""Finds the checkpoints of a folder, selects the one to resume from, and prunes old ones. Needs no torch."""

import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ddpforge import disk
from ddpforge.checkpoint.manifest import check_files, parse_manifest, read_manifest, sealed
from ddpforge.checkpoint.schema import FOLDER, LATEST, Manifest
from ddpforge.errors import CheckpointError
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.recipe.schema import KeepSection

_MOST_HINT = 1 << 16  # bytes
_MANY = 10  # checkpoints that wait for their evaluation

log = logging.getLogger("ddpforge")


class Committed(NamedTuple):
    """Committed checkpoint and its manifest."""

    path: Path
    manifest: Manifest


class Known:
    """Cache of parsed manifests, without tensors and without the state of optimizer and callbacks.

    The key is the checkpoint's name and the manifest's hash. Every lookup reads the manifest's bytes to compute it.
    """

    def __init__(self) -> None:
        self._manifests: dict[str, tuple[str, Manifest]] = {}

    def manifest(self, path: Path) -> Manifest:
        """Returns the reduced manifest of a checkpoint, after the same checks as in `read_manifest`."""
        content, digest = sealed(path)
        known = self._manifests.get(path.name)
        if known is not None and known[0] == digest:
            check_files(path, known[1])
            return known[1]
        self._parse(path, content, digest)
        return self._manifests[path.name][1]

    def read(self, path: Path) -> Manifest:
        """Reads and returns the full manifest, as `read_manifest` does, and adds it to the cache."""
        return self._parse(path, *sealed(path))

    def _parse(self, path: Path, content: bytearray, digest: str) -> Manifest:
        manifest = parse_manifest(path, content)
        check_files(path, manifest)
        slim = manifest.model_copy(update={"tensors": {}, "optimizer": {}, "callbacks": {}})
        self._manifests[path.name] = digest, slim
        return manifest

    def forget(self, path: Path) -> None:
        """Drops a removed checkpoint from the cache."""
        self._manifests.pop(path.name, None)


def committed(
    folder: Path, known: Known | None = None, *, evaluated: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[list[Committed], list[tuple[Path, str]]]:
    """Returns the complete checkpoints in `folder`, newest first, and the other ones with a reason for each.

    Of two checkpoints, the one of the later step is newer; at the same step, the one created later according to its
    manifest. Manifests are checked, contents are not (see `newest`). The returned manifests lack tensors and the state
    of optimizer and callbacks. They have the metrics that `evaluated` has for the name of their folder, too.
    """
    # Modification times of files are not used: copying a folder changes them.
    found, broken = _opened(folder.glob("step-*"), known or Known())
    return [_with(each, (evaluated or {}).get(each.path.name, {})) for each in found], broken


def _with(found: Committed, row: Mapping[str, Any]) -> Committed:
    own = {name: math.nan if value is None else value for name, value in row.items() if name.startswith("eval/")}
    metrics = found.manifest.metrics | own
    return found._replace(manifest=found.manifest.model_copy(update={"metrics": metrics})) if own else found


def _opened(paths: Iterable[Path], known: Known) -> tuple[list[Committed], list[tuple[Path, str]]]:
    found, broken = [], []
    for path in paths:
        try:
            found.append(Committed(path, _open(path, known.manifest)))
        except CheckpointError as error:
            broken.append((path, error.message))
    found.sort(key=lambda each: (each.manifest.step, each.manifest.created), reverse=True)
    return found, broken


def check_folder(folder: Path) -> None:
    """Raises CheckpointError if `folder` exists but cannot be listed, e.g. a link to a disk that is not mounted.

    Otherwise the run would silently start from scratch.
    """
    try:
        os.listdir(folder)
    except OSError as error:
        if os.path.lexists(folder):
            where = f"{folder} → {folder.readlink()}" if folder.is_symlink() else str(folder)
            raise CheckpointError(
                f"the folder of checkpoints cannot be read: {where}: {error.strerror or error}",
                hints=["repair it, mount its disk, or start from scratch with --fresh, which moves it aside"],
            ) from error


def verify(path: Path) -> None:
    """Raises CheckpointError unless the checkpoint `path` is intact to the last byte."""
    read_manifest(path, verify=True)


def newest(folder: Path, verify: Callable[[Path], None] = verify) -> tuple[Path | None, list[tuple[Path, str]]]:
    """Returns the newest checkpoint that is intact to the last byte, and the damaged ones skipped, with reasons.

    Damaged checkpoints of earlier steps than the returned one are not opened and not listed.
    """
    check_folder(folder)
    skipped: list[tuple[Path, str]] = []
    newest_first = sorted(folder.glob("step-*"), key=_step, reverse=True)
    for _, of_one_step in groupby(newest_first, key=_step):  # opens no checkpoint of earlier steps than needed
        found, broken = _opened(of_one_step, Known())
        skipped += broken
        for path, _ in found:
            try:
                verify(path)
            except CheckpointError as error:
                skipped.append((path, error.message))
            else:
                return path, skipped
    return None, skipped


def is_best(metrics: Mapping[str, float], keep: KeepSection, found: list[Committed]) -> bool:
    """True if the metric `keep.by` in `metrics` is better than in all of `found`; False if missing or not finite."""
    if (
        not keep.best
        or keep.monitor is None
        or _lower(keep) is None
        or not math.isfinite(value := metrics.get(keep.monitor, math.nan))
    ):
        return False
    return all(_badness(value, keep) < _badness(each.manifest.metric(keep.monitor), keep) for each in best(found, keep))


def best(found: list[Committed], keep: KeepSection) -> list[Committed]:
    """Returns the checkpoints of `found` with a finite metric `keep.by`, best first.

    `found` must be sorted newest first; of equal ones, the newer comes first. Returns [] if neither `keep.mode` nor the
    metric's name defines whether lower or higher is better.
    """
    if (by := keep.monitor) is None or _lower(keep) is None:
        return []
    known = [each for each in found if math.isfinite(each.manifest.metric(by))]
    return sorted(known, key=lambda each: _badness(each.manifest.metric(by), keep))


def prune(
    folder: Path,
    keep: KeepSection,
    *,
    every: int | None = None,
    known: Known | None = None,
    evaluated: Mapping[str, Mapping[str, Any]] | None = None,
    remove: Callable[[Path], None] = disk.remove,
) -> list[Path]:
    """Removes the checkpoints that `keep` does not keep, and returns their paths.

    Incomplete checkpoints are neither counted nor removed. The checkpoint in `latest.json` is never removed.

    Args:
        every: `keep.every` in steps; step 0 is not kept for it
        known: cache of manifests
        evaluated: metrics by the name of a checkpoint's folder; one that is not in it waits for them, and stays
        remove: deletes the renamed folder; may do so later
    """
    found, _ = committed(folder, known, evaluated=evaluated)
    waiting = [each for each in found if evaluated is not None and each.path.name not in evaluated]
    if waiting and len(waiting) % _MANY == 0:
        log.warning(
            "%d checkpoints wait for their evaluation, and none of them is removed: is `ddpforge eval --follow %s` "
            "running?",
            *(len(waiting), folder.parent),
        )
    milestones = [each for each in found if every and each.manifest.step and each.manifest.step % every == 0]
    kept = {each.path for each in (*found[: keep.last], *best(found, keep)[: keep.best], *milestones, *waiting)}
    removed = [each.path for each in found if each.path not in kept and each.path.name != _latest(folder)]
    for path in removed:
        with _removing(path):
            remove(disk.put_away(path))
        if known is not None:
            known.forget(path)
    return removed


def clean(folder: Path) -> None:
    """Removes half-written and half-removed checkpoints of a killed process. Call it before any process writes."""
    for path in (*folder.glob(".*.tmp"), *folder.glob(".trash-*")):
        with _removing(path):
            disk.remove(path)


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path} could not be removed: {error.strerror or error}") from error


def _open(path: Path, read: Callable[[Path], Manifest]) -> Manifest:
    if path.is_symlink() or not FOLDER.fullmatch(path.name):
        raise CheckpointError(f"{path} is not a checkpoint: it is a link, or its name is not step-<number>-<suffix>")
    manifest = read(path)
    if manifest.step != _step(path):
        raise CheckpointError(f"{path} is the checkpoint of step {manifest.step}, but its name has another step")
    return manifest


def _step(path: Path) -> float:
    match = FOLDER.fullmatch(path.name)
    return int(match[1]) if match else math.inf


def _badness(value: float, keep: KeepSection) -> float:
    """Returns `value` of the metric `keep.monitor`, negated if higher is better."""
    return value if _lower(keep) else -value


def _lower(keep: KeepSection) -> bool | None:
    return keep.mode == "min" if keep.mode else lower_is_better(keep.monitor or "")


def _latest(folder: Path) -> str | None:
    try:
        return str(json.loads(disk.read_plain(folder / LATEST, _MOST_HINT))["dir"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # only a hint: it is missing before the first save, and may have been edited
