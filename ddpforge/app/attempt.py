"""Run attempt on one rank: starts every part once, trains, and ends every part once, after a failure too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.schema import omits_weights
from ddpforge.components.attributes import missing_attribute
from ddpforge.errors import CheckpointError, Diverged, ExitCode, ForgeError, OutOfMemory, PeerFailed, UsageError
from ddpforge.interfaces import RankWatch, RunAttempt, SourceSampler, Tracker, World
from ddpforge.local_world import is_launched
from ddpforge.ranks import heartbeat, process_exit
from ddpforge.ranks.backend_flags import explain_determinism_error
from ddpforge.ranks.devices import name_of_device
from ddpforge.ranks.environment import environment
from ddpforge.ranks.failures import FailureRecord, Failures, exit_code_of, phrase
from ddpforge.ranks.join import leave
from ddpforge.ranks.logs import setup_logging
from ddpforge.ranks.run_limits import NoLimits, RunLimits
from ddpforge.ranks.signals import NoData, training_begins
from ddpforge.ranks.writers import WriterGroup, on_rank_zero
from ddpforge.recipe import Recipe
from ddpforge.runs.changes import reject_finished
from ddpforge.runs.folder import RecipeSnapshot, RunFolder, State, Status, in_words
from ddpforge.runs.media import MediaFiles
from ddpforge.runs.metrics import JSONLTracker, read_evaluations
from ddpforge.runs.observers import Around, RunObserver
from ddpforge.runs.resume import OpenedRun, warn_restart
from ddpforge.secret_redaction import redacted
from ddpforge.training.assemble import assemble, cleanup
from ddpforge.training.callbacks import check_no_state
from ddpforge.training.checks import check_together
from ddpforge.training.contract import contract_of
from ddpforge.training.loop import Trainer
from ddpforge.training.oom import explain_oom, state_bytes
from ddpforge.training.stages import Chosen, Dealt, key_of
from ddpforge.training.trackers import TrackerGroup

__all__ = ["Attempt", "Outcome", "checkpoints_of"]

log = logging.getLogger("ddpforge")

_WRITING = 2.0  # seconds to wait until the first rank that failed has written status.json


@dataclass(frozen=True)
class Outcome:
    """Outcome of a run: the contents of its `status.json`."""

    folder: Path
    status: Status
    is_rank_zero: bool
    if not TYPE_CHECKING:
        __getattr__ = missing_attribute

    @property
    def exit_code(self) -> ExitCode:
        """Returns the exit code for the process."""
        return ExitCode(self.status["exit_code"] or 0)

    def __repr__(self) -> str:
        return f"Outcome({self.sentence()})"

    def sentence(self) -> str:
        """Returns the outcome in one line: folder, state, step and evaluation metrics."""
        return f"{self.folder}: {in_words(self.status)}"


@dataclass(frozen=True)
class _Failed:
    """Failure of an attempt on this rank."""

    error: BaseException
    report: FailureRecord  # about the cause, which may be another rank's
    wrote: bool  # True if this rank wrote it to the run's folder
    by_another: bool


class Attempt:
    """Run attempt on one rank.

    One ExitStack ends all parts in reverse order of their start: callbacks, trackers, the replica and the process
    group, the final status, the lock on the run's folder. It does so after a failure too.
    """

    def __init__(
        self,
        folder: RunFolder,
        opened: OpenedRun,
        chosen: Chosen,
        snapshot: RecipeSnapshot,
        world: World,
        peers: WriterGroup,
        *,
        build: Callable[[], tuple[Dealt, Mapping[str, Any]]],
        claims: ExitStack,
        allow_change: Sequence[str],
        observers: Sequence[RunObserver] = (),
        max_time: str | None = None,
    ) -> None:
        """Stores the parts of an attempt; nothing starts before `run`.

        Args:
            build: builds data and model, or returns them if they are built already.
            claims: holds the lock on the run's folder. `run` takes it over.
            allow_change: recipe keys, or "run", that may differ from the run that is resumed.
            observers: what watches, copies or measures the run.
        """
        self.folder, self.opened = folder, opened
        self.recipe, self.snapshot = chosen.recipe, snapshot
        self.world, self._peers, self._claims = world, peers, claims
        self._build, self._allow_change = build, allow_change
        self._observers = observers
        self._record = JSONLTracker()
        self.tracker = trackers_of(chosen, observers, self._record) if world.is_rank_zero else Tracker()
        self.trainer: Trainer | None = None
        self._halt = RunLimits(folder.path, max_time) if world.is_rank_zero else NoLimits()
        self._state: State = "failed"
        self._begun = False  # True once the run's folder records this attempt
        self._failures = Failures(folder.logs, opened.token, world.global_ranks.rank, world.global_ranks.size)
        self._watch = _watch(folder, opened.token, self.recipe, world)
        self._failed: _Failed | None = None

    def run(self) -> Outcome:
        """Trains; records a failure in the run's folder, reports it to the other ranks, and raises it."""
        setup_logging(self.world.global_ranks.rank, self.folder.path)
        log.debug(
            "rank %d of %d on %s, device %s, pid %d",
            *(self.world.global_ranks.rank, self.world.global_ranks.size, gethostname(), self.world.device, getpid()),
        )
        with self._claims.pop_all() as life:
            life.enter_context(self._watch)
            signals = life.enter_context(ExitStack())
            for observer in self._observers:
                life.push(partial(_end, observer))
            life.push(self._raise_cause)
            life.push(self._leave_group)
            life.push(cleanup(self._finish_trackers))
            try:
                with process_exit.forbid_sys_exit():
                    parts, prints = self._build()
                    checkpoints = checkpoints_of(self.folder, parts, self.world, self._peers)
                    checkpoint = self._open(checkpoints, prints)
                    trainer = self._assemble(parts, checkpoints, checkpoint, life)
                    self._check(trainer, resumes=checkpoint is not None)
                    around = self._begin(trainer, parts, prints, checkpoint)
                    # When a rank fails, the launcher stops the others: the handlers let them finish their reports.
                    signals.enter_context(trainer.stop)
                    self._state = trainer.fit(*around)
                    heartbeat.beat(heartbeat.END)
                    trainer.stop.over()
            except BaseException as error:
                self._report_failure(error)  # before anything else ends: the other ranks wait for this report
                raise
        return Outcome(self.folder.path, self._status(self._state), self.world.is_rank_zero)

    # -- up to the first step
    def _open(self, checkpoints: Checkpoints, prints: Mapping[str, Any]) -> CheckpointReader | None:
        """Opens the newest checkpoint of this run; None if it begins. `prints` has the fingerprints of the data."""
        checkpoint = checkpoints.open()
        if checkpoint is None and self.world.is_rank_zero:
            warn_restart(self.folder)
        if checkpoint:
            on_rank_zero(self.world.global_ranks, partial(self._reject_another_run, checkpoint, prints))
        return checkpoint

    def _assemble(
        self, parts: Dealt, checkpoints: Checkpoints, checkpoint: CheckpointReader | None, life: ExitStack
    ) -> Trainer:
        """Returns the trainer, which continues from `checkpoint` if there is one."""
        initial = checkpoint is None or omits_weights(checkpoint.metadata.loop)
        self.trainer = assemble(
            parts,
            self.world,
            checkpoints,
            self.tracker,
            folder=self.folder.path,
            life=life,
            init_from=self.recipe.checkpoint.init_from if initial else None,
            begins=checkpoint is None,
            trained=checkpoint is not None and checkpoint.metadata.step > 0,
            limits=self._halt,
        )
        if checkpoint:
            self.trainer.restore(checkpoint)
        return self.trainer

    def _check(self, trainer: Trainer, *, resumes: bool) -> None:
        """Raises UsageError if there is nothing to train, and tries the parts that would otherwise fail only later."""
        if resumes:
            self._reject_nothing_to_do(trainer)
        for observer in self._observers:
            observer.check(trainer.plan.horizon.total)
        check_no_state(trainer.callbacks)
        if not resumes:
            trainer.try_evaluation()

    def _begin(
        self, trainer: Trainer, parts: Dealt, prints: Mapping[str, Any], checkpoint: CheckpointReader | None
    ) -> Sequence[Around]:
        """Records the start of the attempt, on all ranks; returns the contexts around the steps."""
        training_begins()
        record, is_rank_zero = self._record, self.world.is_rank_zero
        origin = on_rank_zero(self.world.global_ranks, lambda: self._record_start(trainer, parts, prints))
        trainer.saving.begin(origin, rows=lambda: record.rows if is_rank_zero else None)
        before = checkpoint.metadata.rows if checkpoint and is_rank_zero else None
        if before is not None and record.rows < before:
            log.warning(
                "%s has %d rows up to step %d; it had %d when the checkpoint of that step was saved: rows were lost",
                *(self.folder.metrics, record.rows, trainer.progress.step, before),
            )
        self._begun = True
        around = [observer.around(parts.size.all) for observer in self._observers]
        return [one for one in around if one is not None]

    def _reject_another_run(self, checkpoint: CheckpointReader, prints: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the checkpoint is of another run, UsageError if the data changed since then."""
        run = checkpoint.metadata.run
        if run and run != self.folder.id and "run" not in self._allow_change:
            raise CheckpointError(
                f"{checkpoint.path} is a checkpoint of the run {run}, but {self.folder.path} is the run "
                f"{self.folder.id}",
                hints=[
                    "move the checkpoint out of the folder; to start a new run from its weights, set "
                    "checkpoint.init_from",
                    "or continue from it in this run: --allow-change run",
                ],
            )
        check_together("resume", prints, checkpoint.metadata.data, self._allow_change)

    def _reject_nothing_to_do(self, trainer: Trainer) -> None:
        """Raises UsageError if the run is already past `train.length`, or finished with a different recipe."""
        step = trainer.progress.step
        if step > trainer.end:
            raise UsageError(
                f"{self.folder.path} is at step {step} already, but train.length ends at step {trainer.end}",
                hints=[
                    "continue it with a longer train.length, or start from scratch with --fresh",
                    "for an earlier step see its checkpoints: ddpforge ckpt ls",
                ],
            )
        earlier = self.opened.earlier
        if step == trainer.end and earlier is not None and earlier["state"] == "done":
            changes = [change for change in self.opened.changes if change.path != "train.length"]
            reject_finished(self.folder.path, changes, self.opened.edited)

    def _record_start(self, trainer: Trainer, parts: Dealt, prints: Mapping[str, Any]) -> dict[str, Any]:
        """Writes the attempt to the folder and starts the trackers. Returns the origin to store in checkpoints."""
        step, strategy, order = trainer.progress.step, self.recipe.strategy.use, parts.sampler
        attempt = self.folder.begin_attempt(step=step, **self.snapshot)
        for observer in self._observers:
            observer.on_begin()
        facts = {
            "attempt": attempt,
            "strategy": strategy,
            **trainer.plan.facts(),
            "world_size": self.world.global_ranks.size,
            "device": str(self.world.device),
            "device_name": name_of_device(self.world.device),
            "parameters": parts.size.all,
            "trained": parts.size.trainable,
            "frozen": parts.size.frozen,
            "held": state_bytes(contract_of(parts.strategy), trainer.replica.weights, parts.size),
            "samples": length_of(parts.data["train"]),
            "sources": dict(zip(order.names, order.shares(), strict=True)) if isinstance(order, SourceSampler) else {},
            "evaluated": {name: length_of(parts.data[key_of(name)]) for name in parts.evaluation},
        }
        self.tracker.start(
            name=self.recipe.name,
            folder=self.folder.path,
            config=redacted(parts.loaded.tables) | {"run": facts},
            resumed_at=step if attempt > 1 else None,
        )
        self.folder.write_status(self._status("running", begun=True))
        return {
            "recipe": self.snapshot["resolved"],
            "run": self.folder.id,
            "data": {key: one.as_json() for key, one in prints.items()},
            "lineage": self.folder.lineage(),
            "strategy": strategy,
            "world_size": self.world.global_ranks.size,
        }

    # -- after the last one
    def _finish_trackers(self, error: BaseException | None) -> None:
        if error is not None:
            self._report_failure(error)
        tracker, self.tracker = self.tracker, Tracker()
        tracker.finish(state=self._state, summary=self.trainer.rows.newest if self.trainer else {})

    def _leave_group(self, _: object, error: BaseException | None, __: object) -> None:
        """Leaves the process group once all ranks reach this point, and writes the final status."""
        if error is not None or self.trainer is None:
            return
        self.trainer.replica.close()
        leave(self.world)
        if self.world.is_rank_zero:
            self.folder.write_status(self._status(self._state))

    def _raise_cause(self, _: object, error: BaseException | None, __: object) -> None:
        """Raises the error that this rank shows instead of `error`: the cause, with the run's status attached."""
        if error is None:
            return
        failed = self._report_failure(error)
        raised = failed.error
        if failed.by_another:
            raised = self._peer_failure(failed)
        self._attach_status(raised, self._status(self._state, failed.report), written_here=failed.wrote)
        if raised is not error:
            raise raised from error

    # -- when something failed
    def _report_failure(self, error: BaseException) -> _Failed:
        """Reports `error` to the other ranks and finds its cause; the first rank that failed writes it to the folder.

        Only the first call has an effect. Errors in here are only logged: they must not hide `error`, or the failure of
        another rank that caused it.
        """
        if self._failed:
            return self._failed
        error = explain_determinism_error(explain_oom(error, self.recipe, self.world.dp_ranks.size))
        # Only into the log file: the command line shows this error, or its cause.
        log.error("training failed: %s", phrase(error), exc_info=error, extra={"in_file_only": True})
        report, is_peers = self._failures.record(error, exit_code_of(error)), isinstance(error, PeerFailed)
        heartbeat.mark_exited()
        wrote = False
        if isinstance(error, OutOfMemory):  # the plan takes a while, and the other ranks must not wait for it
            wrote = self._write_failure("failed", report)
            for observer in self._observers:
                error = observer.explain(error)
            report = self._failures.record(error, exit_code_of(error))
        cause = self._failures.explain(self._watch.call) if report.symptom and not is_peers else None
        self._state = "diverged" if isinstance(error, Diverged) else "failed"
        if isinstance(error, NoData):
            self._state = "preempted"
        wrote = not is_peers and self._write_failure(self._state, cause or report, again=wrote)
        self._failed = _Failed(error, cause or report, wrote=wrote, by_another=cause is not None)
        return self._failed

    def _write_failure(self, state: State, report: FailureRecord, *, again: bool = False) -> bool:
        """Writes status.json and failure.json if this rank failed first. True on that rank.

        `again`: this rank was the first already and replaces its report.
        """
        first, earlier = again, self.opened.earlier
        try:
            first = again or self._failures.claim_first(report)
            # A usage error must not overwrite the status of a finished run.
            refused = report.exit_code == ExitCode.USAGE and not self._begun
            leaves = refused and earlier is not None and earlier["state"] in ("done", "preempted")
            if (first or (self.world.is_rank_zero and not report.self_reported)) and not leaves:
                self.folder.write_status(self._status(state, report))
            if first and not report.symptom:
                self.folder.write_failure(report.with_ranks([heartbeat.here(self.world.global_ranks.rank)]))
        except (ForgeError, OSError) as another:
            log.warning("while the run was ending: %s", another)
        return first

    def _peer_failure(self, failed: _Failed) -> ForgeError:
        """Returns the error for a rank that failed because another rank did. Only one rank shows it."""
        cause = failed.report
        file = self.folder.logs / f"rank-{cause.rank}.log"
        words = f"rank {cause.rank} failed first: {cause.error}" if cause.self_reported else str(cause)
        hints = [f"see {file}" if cause.self_reported else f"the state of all ranks: {self.folder.failure}"]
        # The launcher prints the report of a watchdog last, after torchrun's messages.
        launcher_prints = is_launched() and not cause.self_reported
        prints_for_all = cause.rank == 0 and (
            failed.wrote or (not cause.self_reported and self.world.global_ranks.rank == 1)
        )
        if launcher_prints or not (self.world.is_rank_zero or prints_for_all):
            return PeerFailed(ExitCode(cause.exit_code), words, hints=hints, launcher_prints=launcher_prints)
        error = ForgeError(words, hints=hints)
        error.exit_code = ExitCode(cause.exit_code)
        return error

    def _attach_status(self, error: BaseException, status: Status, *, written_here: bool) -> None:
        """Attaches the run's status to the exception. Rank 0 waits up to 2 s for the failing rank to write it."""
        deadline = time.monotonic() + (0.0 if written_here or not self.world.is_rank_zero else _WRITING)
        with suppress(ForgeError):
            while (written := self.folder.status()) in (None, self.opened.earlier) or written["state"] == "running":
                if time.monotonic() >= deadline:
                    written = status
                    break
                time.sleep(0.02)
            status = written
        error.outcome = Outcome(self.folder.path, status, self.world.is_rank_zero)  # type: ignore[attr-defined]

    def _status(self, state: State, report: FailureRecord | None = None, *, begun: bool = False) -> Status:
        """Returns the contents of `status.json`; before this attempt trains, with the step of the earlier attempt."""
        codes = {"running": None, "done": ExitCode.DONE, "preempted": ExitCode.PREEMPTED}
        trainer = self.trainer if self._begun or begun else None
        earlier = self.opened.earlier
        return Status(
            state=state,
            exit_code=report.exit_code if report else codes.get(state, ExitCode.FAILED),
            step=trainer.progress.step if trainer else earlier["step"] if earlier else 0,
            total_steps=trainer.plan.horizon.total if trainer else earlier.get("total_steps") if earlier else None,
            samples=trainer.progress.samples if trainer else earlier["samples"] if earlier else 0,
            world_size=self.world.global_ranks.size,
            strategy=self.recipe.strategy.use,
            metrics=trainer.rows.newest if trainer else earlier["metrics"] if earlier else {},
            error=str(report) if report else None,
        )


def _watch(folder: RunFolder, token: str, recipe: Recipe, world: World) -> RankWatch:
    train = recipe.train
    return environment().watch(
        RunAttempt(
            folder=folder.path,
            token=token,
            rank=world.global_ranks.rank,
            size=world.global_ranks.size,
            device=world.device,
            strategy=recipe.strategy.use,
            hang_timeout=0.0 if train.hang_timeout == "off" else train.hang_timeout.seconds,
            compiles=train.compile != "off",
        )
    )


def _end(observer: RunObserver, _: object, error: BaseException | None, __: object) -> None:
    observer.on_end(error)


def length_of(data: Any) -> int | None:
    """Returns the number of samples; None for a stream."""
    return len(data) if hasattr(data, "__len__") else None


def checkpoints_of(folder: RunFolder, parts: Dealt, world: World, peers: WriterGroup) -> Checkpoints:
    """Returns the checkpoints in a run's folder."""
    return Checkpoints(
        folder.checkpoints,
        parts.recipe.checkpoint,
        peers=peers,
        ranks=world.global_ranks,
        keep_every=parts.plan.every.get("checkpoint.keep.every"),
        before_commit=folder.sync_metrics,
        evaluations=lambda: read_evaluations(folder.path) if parts.recipe.train.eval_by == "follower" else None,
    )


def trackers_of(parts: Chosen, observers: Sequence[RunObserver], record: JSONLTracker) -> Tracker:
    """Returns metrics.jsonl, console, the trackers of observers and of the recipe as one tracker."""
    console = parts.registry.load("tracker", "console")()
    console.follow(lambda: (heartbeat.NAMES[(now := heartbeat.current()).phase], now.step))
    ours: dict[str, Any] = {"jsonl": record, "console": console, "shown": MediaFiles()}
    for observer in observers:
        if (tracker := observer.tracker()) is not None:
            ours[type(tracker).__name__.lower()] = tracker
    return TrackerGroup(ours | dict(parts.trackers))
