"""Opens a run's folder for an attempt: claims it, compares recipes, and refuses changes that would lose or mix work."""

from __future__ import annotations

import logging
import os
import secrets
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ddpforge import disk
from ddpforge.checkpoint.retention import check_folder
from ddpforge.errors import CheckpointError, SetupError
from ddpforge.ranks.failures import Failures
from ddpforge.runs.changes import Change, recipe_changes, reject_finished, reject_fixed, reject_unknown
from ddpforge.runs.folder import RecipeSnapshot, RunFolder, Status

__all__ = ["OpenedRun", "finished_before", "is_finished", "open_folder", "warn_restart"]

log = logging.getLogger("ddpforge")


@dataclass(frozen=True)
class OpenedRun:
    """State in which rank 0 found the run's folder.

    `token` is a random id of the attempt. `result` is the status of a finished run that has nothing left to train.
    `changes` and `edited` are the differences from the recipe and the local code of the last attempt.
    """

    token: str
    earlier: Status | None = None
    result: Status | None = None
    changes: Sequence[Change] = ()
    edited: Sequence[str] = ()


def open_folder(
    folder: RunFolder, snapshot: RecipeSnapshot, claims: ExitStack, *, fresh: bool, allow_change: Sequence[str]
) -> OpenedRun:
    """Creates or opens the folder, claimed until `claims` closes; raises UsageError for a refused change."""
    token = secrets.token_hex(8)
    now = tomllib.loads(snapshot["resolved"])
    reject_unknown(allow_change, now, folder.tables() if folder.exists() else {})
    if fresh and folder.exists():
        with folder.claim():
            log.info("the earlier run was renamed to %s", folder.retire())
    if not folder.exists() and claims.enter_context(folder.claim_new(**snapshot)):
        return OpenedRun(token)

    folder.reject_odd()
    earlier = _status(folder)
    changes = recipe_changes(folder.tables(), now)
    edited = _edited(folder, snapshot)
    if _is_finished(folder, earlier, changes, edited):
        log.info("%s is finished; --fresh trains it from scratch, a longer train.length continues it", folder.path)
        return OpenedRun(token, result=earlier)

    claims.enter_context(folder.claim())
    _settle_changes(folder, changes, edited, allow_change)
    Failures.clear(folder.logs)
    disk.remove(folder.failure)
    return OpenedRun(token, earlier, changes=changes, edited=edited)


def _status(folder: RunFolder) -> Status | None:
    """Returns the status of the last attempt; None if it is damaged, because checkpoints do not depend on it."""
    try:
        return folder.status()
    except SetupError as error:
        log.warning("%s; the run continues from its checkpoints", error.message)
        return None


def is_finished(folder: RunFolder, snapshot: RecipeSnapshot) -> bool:
    """True if this run is already trained; raises UsageError if it finished with another recipe or code."""
    if not folder.exists():
        return False
    changes = recipe_changes(folder.tables(), tomllib.loads(snapshot["resolved"]))
    return _is_finished(folder, folder.status(), changes, _edited(folder, snapshot))


def finished_before(folder: RunFolder, snapshot: RecipeSnapshot) -> Status | None:
    """Returns the status of a run that has finished with this recipe and code; None for any other run."""
    status = folder.status() if folder.exists() else None
    if not status or status["state"] != "done" or _edited(folder, snapshot):
        return None
    return None if recipe_changes(folder.tables(), tomllib.loads(snapshot["resolved"])) else status


def _is_finished(folder: RunFolder, status: Status | None, changes: Sequence[Change], edited: Sequence[str]) -> bool:
    if not status or status["state"] != "done" or any(change.path == "train.length" for change in changes):
        return False
    reject_finished(folder.path, changes, edited)
    return True


def _edited(folder: RunFolder, snapshot: RecipeSnapshot) -> list[str]:
    """Returns the names of local files with another code than in the last attempt."""
    kept = {name: folder.path / name for name in snapshot["local_files"]}
    return [
        Path(name).name
        for name, code in snapshot["local_files"].items()
        if os.path.lexists(kept[name]) and folder.code(kept[name]) != code
    ]


def _settle_changes(
    folder: RunFolder, changes: Sequence[Change], edited: Sequence[str], allow_change: Sequence[str]
) -> None:
    """Raises UsageError for changes of fixed keys, unless the run has no checkpoint to lose; logs all changes."""
    if _may_have_checkpoints(folder):
        reject_fixed(changes, allow_change)
    elif changes or edited:
        log.info("no checkpoint was saved: the new recipe applies from the first step")
    for change in changes:
        log.info("changed since the last attempt: %s", change)
    for name in edited:
        log.info("changed since the last attempt: the code in %s", name)


def _may_have_checkpoints(folder: RunFolder) -> bool:
    try:
        check_folder(folder.checkpoints)
    except CheckpointError:
        return True  # the attempt will raise this error
    return any(folder.checkpoints.glob("step-*"))


def warn_restart(folder: RunFolder) -> None:
    """Logs a warning if an earlier attempt trained, but the run has no checkpoint and starts from scratch."""
    status = folder.status()
    if status is not None and status["step"]:
        log.warning(
            "%s has no checkpoints: training starts from scratch, although an earlier attempt reached step %d",
            folder.path,
            status["step"],
        )
