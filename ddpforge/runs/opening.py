"""Opens a run's folder for another attempt: claims it, compares recipes, and refuses what would lose or mix up work."""

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
from ddpforge.errors import CheckpointError
from ddpforge.ranks.failures import Failures
from ddpforge.runs.changes import Change, recipe_changes, refuse_finished, refuse_fixed
from ddpforge.runs.folder import RecipeSnapshot, RunFolder, Status

__all__ = ["Opened", "is_finished", "mention_what_is_lost", "open_folder"]

log = logging.getLogger("ddpforge")


@dataclass(frozen=True)
class Opened:
    """The state in which rank 0 found the run's folder; `token` is the attempt's own.

    `result` is what a finished run has come to, if that is all that is asked for; `changes` and `edited` tell the
    recipe from the one before.
    """

    token: str
    earlier: Status | None = None
    result: Status | None = None
    changes: Sequence[Change] = ()
    edited: Sequence[str] = ()


def open_folder(
    folder: RunFolder, snapshot: RecipeSnapshot, claims: ExitStack, *, fresh: bool, allow_change: Sequence[str]
) -> Opened:
    """Makes sure that the folder may be trained in, until `claims` ends."""
    token = secrets.token_hex(8)
    if fresh and folder.exists():
        with folder.claim():
            log.info("the earlier run is kept as %s", folder.retire())
    if not folder.exists() and claims.enter_context(folder.claim_new(**snapshot)):
        return Opened(token)

    folder.refuse_odd()
    earlier = folder.status()
    changes = recipe_changes(folder.tables(), tomllib.loads(snapshot["resolved"]))
    edited = _edited(folder, snapshot)
    if _is_finished(folder, earlier, changes, edited):
        log.info("%s is finished; --fresh trains it from scratch, a longer train.length continues it", folder.path)
        return Opened(token, result=earlier)

    claims.enter_context(folder.claim())
    _settle_changes(folder, changes, edited, allow_change)
    Failures.clear(folder.logs)
    disk.remove(folder.failure)
    return Opened(token, earlier, changes=changes, edited=edited)


def is_finished(folder: RunFolder, snapshot: RecipeSnapshot) -> bool:
    """True where the run that is asked for has been trained; raises UsageError where it is another one by now."""
    if not folder.exists():
        return False
    changes = recipe_changes(folder.tables(), tomllib.loads(snapshot["resolved"]))
    return _is_finished(folder, folder.status(), changes, _edited(folder, snapshot))


def _is_finished(folder: RunFolder, status: Status | None, changes: Sequence[Change], edited: Sequence[str]) -> bool:
    if not status or status["state"] != "done" or any(change.path == "train.length" for change in changes):
        return False
    refuse_finished(folder.path, changes, edited)
    return True


def _edited(folder: RunFolder, snapshot: RecipeSnapshot) -> list[str]:
    """The names of local files whose code is not what the last attempt used."""
    kept = {name: folder.path / name for name in snapshot["local_files"]}
    return [
        Path(name).name
        for name, code in snapshot["local_files"].items()
        if os.path.lexists(kept[name]) and folder.code(kept[name]) != code
    ]


def _settle_changes(
    folder: RunFolder, changes: Sequence[Change], edited: Sequence[str], allow_change: Sequence[str]
) -> None:
    """Refuses what would make another run of it, unless nothing would be lost by that."""
    if _may_have_checkpoints(folder):
        refuse_fixed(changes, allow_change)
    elif changes or edited:
        log.info("no checkpoint was saved: the new recipe counts from the first step")
    for change in changes:
        log.info("changed since the last attempt: %s", change)
    for name in edited:
        log.info("changed since the last attempt: the code in %s", name)


def _may_have_checkpoints(folder: RunFolder) -> bool:
    try:
        check_folder(folder.checkpoints)
    except CheckpointError:
        return True  # the attempt will say so
    return any(folder.checkpoints.glob("step-*"))


def mention_what_is_lost(folder: RunFolder) -> None:
    """A run that starts from scratch, because it has no checkpoint, does not do so behind anybody's back."""
    status = folder.status()
    if status is not None and status["step"]:
        log.warning(
            "%s has no checkpoints: training starts from scratch, and an earlier attempt had come to step %d",
            folder.path,
            status["step"],
        )
