"""Evaluation during training: a follower in its own processes evaluates the checkpoints of a run as they appear."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ddpforge import disk
from ddpforge.app.evaluate import Evaluation, choose_parts, evaluate_checkpoint
from ddpforge.app.run import join
from ddpforge.checkpoint import retention
from ddpforge.checkpoint.schema import FOLDER
from ddpforge.components.registry import Registry, build
from ddpforge.errors import CheckpointError, SetupError, UsageError
from ddpforge.ranks import process_exit
from ddpforge.ranks.backend_flags import restored_backend_flags
from ddpforge.ranks.environment import environment
from ddpforge.ranks.join import leave
from ddpforge.ranks.run_limits import seconds_of
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.recipe import load_recipe
from ddpforge.runs.changes import recipe_changes
from ddpforge.runs.checkpoints import keep_of
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.metrics import Row, evaluation_file, line_of, read_evaluations
from ddpforge.runs.summary import summarize
from ddpforge.training.stages import Chosen
from ddpforge.training.trackers import TrackerGroup
from ddpforge.watchdog.watchdog import end_startup_watch

__all__ = ["Followed", "follow"]

log = logging.getLogger("ddpforge")

_POLL = 1.0  # seconds between two looks into the run's folder
_LOOKS = 3  # a checkpoint is damaged if this number of looks finds damage: a shared folder may show files late


@dataclass(frozen=True)
class Followed:
    """Result of following a run: its last state, and the number of checkpoints that this process evaluated."""

    state: str
    evaluated: int
    is_rank_zero: bool


class _Look(NamedTuple):
    """Finding of rank 0: a checkpoint to evaluate, the end, or neither."""

    checkpoint: Path | None = None
    ends: bool = False


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def follow(
    folder: RunFolder,
    report: Callable[[Evaluation], None],
    *,
    sets: Sequence[str] = (),
    wait: str = "1m",
    registry: Registry | None = None,
) -> Followed:
    """Evaluates each checkpoint of a run that has no evaluation yet, until the run has ended. Call it on every rank.

    Writes each result into the run's folder. `read_metrics` finds it at the step of the checkpoint. Several
    followers share the checkpoints; a dead follower's checkpoint is free again at once.

    Args:
        folder: the run's folder; the run may be on another machine that shares it.
        report: receives each result, on rank 0.
        sets: changes to the recipe, KEY=VALUE, of keys that do not change the numbers.
        wait: time to wait for a run to go on that is neither running nor done, e.g. "10m".
        registry: the components; by default the installed ones.

    Raises UsageError for a key of `sets` that changes the numbers, and for a run that ended without a checkpoint;
    SetupError if the folder cannot be written; CheckpointError for damaged checkpoints, after all others are evaluated.
    """
    environment().export_variables()
    seconds = seconds_of(wait, "--wait")
    registry = registry or Registry.installed()
    _check_sets(folder, sets, registry)
    first, _ = choose_parts(folder, sets, registry)
    world = join(first)
    if first.other_layout and world.is_rank_zero:
        log.info("%s", first.other_layout)
    end_startup_watch()  # the run may take days
    waiting, evaluated, joined = _Waiting(folder, seconds), 0, False
    trackers = _trackers(first) if world.is_rank_zero else TrackerGroup({})
    while not (look := on_rank_zero(world.global_ranks, waiting.look)).ends:
        if look.checkpoint is None:
            time.sleep(_POLL)
            continue
        chosen, problems = choose_parts(folder, sets, registry)  # a component holds state of the model that it served
        chosen = replace(chosen, strategy=first.strategy)  # which has set up the ranks
        try:
            found = evaluate_checkpoint(look.checkpoint, chosen, world, problems, folder)
        except CheckpointError as error:
            if look.checkpoint.exists():
                raise
            log.info("%s was removed before its evaluation: %s", look.checkpoint, error.message)
            continue
        evaluated += 1
        if world.is_rank_zero and waiting.publish(found):
            if not joined:
                joined = trackers.join(folder.path)
            trackers.log(found.step, found.metrics)
            report(found)
    trackers.leave()
    state = on_rank_zero(world.global_ranks, lambda: waiting.finish(evaluated))
    leave(world)
    return Followed(state, evaluated, world.is_rank_zero)


def _check_sets(folder: RunFolder, sets: Sequence[str], registry: Registry) -> None:
    """Raises UsageError for changes of the recipe after which the numbers would not be those of the run."""
    plain, changed = (load_recipe(folder.resolved, sets=some, registry=registry).tables for some in ((), sets))
    if others := [change for change in recipe_changes(plain, changed) if change.policy != "free"]:
        raise UsageError(
            f"--follow writes into the metrics of the run, but --set changes the numbers: {others[0]}",
            hints=[
                f"omit {', '.join(change.path for change in others)}",
                "without --follow, an evaluation writes nothing, and may change any key",
            ],
        )


def _trackers(chosen: Chosen) -> TrackerGroup:
    trackers = chosen.recipe.track.trackers.items()
    return TrackerGroup({name: build(chosen.registry, "tracker", component) for name, component in trackers})


class _Waiting:
    """Checkpoints of a run that wait for an evaluation, on rank 0. Holds the claim on one of them at a time."""

    def __init__(self, folder: RunFolder, wait: float) -> None:
        self._folder, self._wait = folder, wait
        self._claim = ExitStack()
        self._checkpoint = Path()
        self._run = folder.id
        self._by_run: dict[str, bool] = {}  # by checkpoint: whether the run itself has evaluated it
        self._flaws: dict[str, int] = {}  # the number of looks that found damage in a checkpoint
        self._idle_since: float | None = None
        self._said = ""

    def look(self) -> _Look:
        """Claims the earliest checkpoint without an evaluation, if there is one, and verifies it."""
        self._claim.close()
        ended = self._has_ended()  # before the list: a checkpoint that is not in it then will never come
        others = False
        for path in self._without_evaluation():
            with ExitStack() as claim:
                if not claim.enter_context(self._claimed(path.name)):
                    others = True
                elif path.name not in self._evaluated() and self._is_intact(path):
                    self._claim, self._checkpoint = claim.pop_all(), path
                    return _Look(path)
                else:
                    others |= path.name in self._flaws
        return _Look(ends=ended and not others)

    def publish(self, found: Evaluation) -> bool:
        """Writes the metrics of the claimed checkpoint; returns False if the run was replaced by another meanwhile."""
        if not self._folder.exists() or self._folder.id != self._run:
            log.warning("%s was started from scratch: an evaluation of the earlier run is dropped", self._folder.path)
            return False
        self._write(self._checkpoint, found.step, found.metrics)
        return True

    def finish(self, evaluated: int) -> str:
        """Returns the state of the run. Raises CheckpointError for damaged checkpoints, UsageError without any."""
        rows = self._evaluated()
        damaged = [name for name, row in rows.items() if not any(key.startswith("eval/") for key in row)]
        state, by_run = summarize(self._folder).state, sum(self._by_run.values())
        log.info(
            "%s is %s: %d checkpoints were evaluated here, %d before or by others",
            *(self._folder.path, state, evaluated, len(rows) + by_run - len(damaged) - evaluated),
        )
        if state == "done":
            self._prune(rows)
        if damaged:
            raise CheckpointError(
                f"{len(damaged)} checkpoints of {self._folder.path} are damaged and have no evaluation: "
                f"{', '.join(damaged)}",
                hints=["ddpforge ckpt verify names the damage of one"],
            )
        if not rows and not by_run:
            raise UsageError(
                f"{self._folder.path} has ended without a checkpoint ({state})",
                hints=["the same command follows it once it trains again", "--wait 10m waits longer for a start"],
            )
        return state

    def _prune(self, evaluated: Mapping[str, Row]) -> None:
        """Removes the checkpoints that waited for their evaluation when the run ended, and that its recipe drops."""
        tables, keep = self._folder.tables(), keep_of(self._folder)
        if tables.get("train", {}).get("eval_by") != "follower":
            return
        if keep.every and keep.every.unit != "st":
            log.info("no checkpoint is removed: checkpoint.keep.every counts epochs, which only the run knows")
            return
        every = int(keep.every.value) if keep.every else None
        with suppress(SetupError), self._folder.claim():  # another follower may be doing it
            for path in retention.prune(self._folder.checkpoints, keep, every=every, evaluated=evaluated):
                log.info("removed %s, by checkpoint.keep", path)

    # -- the run
    def _has_ended(self) -> bool:
        """True if the run is done, or has not been running for `wait` seconds. Logs a change of its state."""
        folder = self._folder
        if folder.exists() and (now := folder.id) != self._run:
            log.info("%s was started from scratch: following the new run", folder.path)
            self._run, self._by_run, self._flaws = now, {}, {}
        claimed, status = folder.is_claimed(), folder.status() if folder.exists() else None
        state = status["state"] if status else "new"
        # Without locks on this file system, the status shows whether the run trains.
        if claimed or (claimed is None and state == "running"):
            self._idle_since, said = None, "is running"
        else:
            self._idle_since = self._idle_since or time.monotonic()
            said = f"is {state}" if state != "running" else "was killed"
        if said != self._said:
            self._said = said
            log.info("%s %s", folder.path, said)
        if self._idle_since is None:
            return False
        return state == "done" or time.monotonic() - self._idle_since >= self._wait

    def _evaluated(self) -> dict[str, Row]:
        return read_evaluations(self._folder.path)

    def _without_evaluation(self) -> list[Path]:
        """Returns the checkpoints that have no evaluation, of this process, of others or of the run, by step."""
        evaluated = self._evaluated()
        paths = sorted(path for path in self._folder.checkpoints.glob("step-*") if FOLDER.fullmatch(path.name))
        for path in paths:
            if path.name not in self._by_run and path.name not in evaluated:
                with suppress(CheckpointError):  # `_is_intact` reports it
                    metrics = retention.Known().manifest(path).metrics
                    self._by_run[path.name] = any(name.startswith("eval/") for name in metrics)
        return [path for path in paths if path.name not in evaluated and not self._by_run.get(path.name)]

    def _is_intact(self, path: Path) -> bool:
        """True if a claimed checkpoint is whole; after some looks, records a damaged one as one without metrics."""
        try:
            retention.verify(path)
        except CheckpointError as error:
            if not path.exists():  # removed meanwhile
                self._flaws.pop(path.name, None)
                return False
            self._flaws[path.name] = self._flaws.get(path.name, 0) + 1
            if self._flaws[path.name] >= _LOOKS:
                log.warning("%s cannot be evaluated: %s", path, error.message)
                self._write(path, int(path.name.split("-")[1]), {})
                del self._flaws[path.name]
            return False
        self._flaws.pop(path.name, None)
        return True

    # -- the run's folder
    @contextmanager
    def _claimed(self, checkpoint: str) -> Iterator[bool]:
        """Locks a checkpoint's evaluation; yields False if another process has it. The lock ends with its process."""
        path = evaluation_file(self._folder.path, checkpoint).with_suffix(".lock")
        with _writing(path):
            path.parent.mkdir(exist_ok=True)
            file = disk.open_plain(path, "a+b", within=self._folder.path, buffering=0)
        with file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                yield False
                return
            except OSError as error:
                log.warning("%s cannot be locked (%s): make sure that no other process follows the run", path, error)
            # The file may have been removed since it was opened: by a process that had claimed the checkpoint.
            mine = os.fstat(file.fileno()).st_nlink > 0
            yield mine
            if mine:
                path.unlink(missing_ok=True)

    def _write(self, checkpoint: Path, step: int, metrics: Mapping[str, float]) -> None:
        path = evaluation_file(self._folder.path, checkpoint.name)
        with _writing(path):
            disk.replace(path, line_of(step, self._folder.attempts(), metrics))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SetupError(
            f"{path} cannot be written: {error.strerror or error}",
            hints=["a follower writes its evaluations into the run's folder: run it with the rights for that"],
        ) from error
