"""The composition root: a recipe in, a trained model out. The story of a run, told once."""

from __future__ import annotations

import faulthandler
import logging
import math
import secrets
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import _exit, getpid
from pathlib import Path
from socket import gethostname
from typing import Any

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.checkpoint.retention import check_folder
from ddpforge.components.registry import Registry
from ddpforge.confidential import redacted
from ddpforge.errors import CheckpointError, Diverged, ExitCode, ForgeError, PeerFailed, UsageError
from ddpforge.interfaces import Callback, Tracker, World
from ddpforge.launch import record_verdict
from ddpforge.ranks import leaving
from ddpforge.ranks.failures import Failures, Peer, Report, phrase
from ddpforge.ranks.join import join, leave
from ddpforge.ranks.logs import setup_logging
from ddpforge.ranks.rank_zero import on_rank_zero
from ddpforge.ranks.watch import Watch
from ddpforge.ranks.writers import Peers
from ddpforge.recipe import Recipe, load_recipe
from ddpforge.recipe.batch import check_world, plan_batch
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import (
    Change,
    Papers,
    RunFolder,
    State,
    Status,
    papers_of,
    recipe_changes,
    refuse_finished,
    refuse_fixed,
)
from ddpforge.training.assemble import assemble
from ddpforge.training.loop import Trainer
from ddpforge.training.memory import explained
from ddpforge.training.parts import Parts
from ddpforge.training.trackers import Several

__all__ = ["Evaluation", "Outcome", "evaluate", "run"]

log = logging.getLogger("ddpforge")

_WRITING = 2.0  # seconds in which another rank has written status.json, when it was the first to fail


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as its `status.json` says it."""

    folder: Path
    status: Status
    is_main: bool

    @property
    def exit_code(self) -> ExitCode:
        """What the process should end with."""
        return ExitCode(self.status["exit_code"] or 0)

    def sentence(self) -> str:
        """The outcome for people."""
        metrics = {name: value for name, value in self.status["metrics"].items() if name.startswith("eval/")}
        numbers = "".join(f", {name} {value:.4g}" for name, value in metrics.items() if value is not None)
        return f"{self.folder}: {self.status['state']} at step {self.status['step']}{numbers}"


@leaving.nobody_leaves()
def run(
    source: str | Path,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
) -> Outcome:
    """Trains a recipe in the world that the launcher's environment describes; called on every rank.

    `source` is a recipe file or the name of a bundled recipe, `out` replaces its `output_dir`, and `fresh` sets an
    earlier run of this name aside instead of continuing it. Raises ForgeError for everything that can be expected
    to go wrong; a RecipeError comes before anything is started.
    """
    parts = _load(source, sets)
    folder = RunFolder.of(parts.recipe, out)
    is_new = fresh or not folder.exists()
    world = _join(parts, folder=None if fresh else folder)
    peers = _peers(parts.recipe, world)
    if is_new:
        _on_every_rank(peers, lambda: _build(parts, world, rehearses=True))
    papers = papers_of(parts.loaded)
    with ExitStack() as claims:
        opened = on_rank_zero(
            world.all,
            lambda: _open(folder, papers, claims, fresh=fresh, allow_change=allow_change),
        )
        if opened.result:
            return Outcome(folder.path, opened.result, world.is_main)
        return Attempt(folder, opened, parts, papers, world, peers, is_built=is_new).run()


@dataclass(frozen=True)
class _Opened:
    """How rank 0 found the run's folder; `token` is the attempt's own.

    `result` is what a finished run has come to, if that is all that is asked for; `changes` and `edited` tell the
    recipe from the one before.
    """

    token: str
    earlier: Status | None = None
    result: Status | None = None
    changes: Sequence[Change] = ()
    edited: Sequence[str] = ()


class Attempt:
    """One attempt at a run on one rank: everything is started once, and ended once, however it ends."""

    def __init__(
        self,
        folder: RunFolder,
        opened: _Opened,
        parts: Parts,
        papers: Papers,
        world: World,
        peers: Peers,
        *,
        is_built: bool,
    ) -> None:
        self.folder, self.opened = folder, opened
        self.parts, self.loaded, self.recipe, self.papers = parts, parts.loaded, parts.recipe, papers
        self.world, self._peers, self._is_built = world, peers, is_built
        self.tracker = _trackers(parts) if world.is_main else Tracker()
        self.trainer: Trainer | None = None
        self._started: list[Callback] = []  # those that have not heard how it ended
        self._begun = False  # whether the run's folder knows of this attempt
        self._failures = Failures(folder.logs, opened.token, Peer.me(world.all.rank))
        self._watch: Watch | None = None

    def run(self) -> Outcome:
        """Trains; whatever goes wrong is written down, told to who must know, and raised."""
        setup_logging(self.world.all.rank, self.folder.path)
        log.debug(
            "rank %d of %d on %s, device %s, pid %d",
            *(self.world.all.rank, self.world.all.size, gethostname(), self.world.device, getpid()),
        )
        with ExitStack() as stack:
            stack.callback(lambda: self._failures.local.close())
            try:
                with leaving.nobody_leaves():
                    trainer = self._prepare()
                    stack.enter_context(trainer.stop)  # a launcher ends the others of a rank that failed: not mid-word
                    status = self._end(trainer, trainer.fit())
            except BaseException as error:
                told = self._fail(explained(error, self.recipe, self.world.data.size))
                if told is error:
                    raise
                raise told from error
        return Outcome(self.folder.path, status, self.world.is_main)

    # -- up to the first step
    def _prepare(self) -> Trainer:
        """A trainer that stands where the run has come to, when everybody is told that training begins."""
        everyone = self._peers.ranks.everyone(self._failures.me)
        self._failures = Failures(self.folder.logs, self.opened.token, self._failures.me, everyone)
        self._watch = Watch(self._failures, self._give_up)
        if not self._is_built:
            _build(self.parts, self.world, rehearses=False)
        checkpoints = _checkpoints(self.folder, self.recipe, self.world, self._peers)
        checkpoint = checkpoints.open()
        if checkpoint is None and self.world.is_main:
            _mention_what_is_lost(self.folder)
        init_from = None if checkpoint else self.recipe.checkpoint.init_from
        trainer = self.trainer = assemble(
            self.parts, self.world, checkpoints, self.tracker, init_from=init_from, started=self._started
        )
        if checkpoint:
            trainer.restore(checkpoint)
            self._refuse_nothing_to_do(trainer)
        trainer.origin = on_rank_zero(self.world.all, lambda: self._begin(trainer))
        self._begun = True
        return trainer

    def _refuse_nothing_to_do(self, trainer: Trainer) -> None:
        """Raises UsageError where nothing would be trained, and what was trained is not what is asked for."""
        step = trainer.progress.step
        if step > trainer.end:
            raise UsageError(
                f"{self.folder.path} has come to step {step}, and train.length ends at step {trainer.end}",
                hints=[
                    "go on with it with a longer train.length, or begin anew with --fresh",
                    "what it was at an earlier step is in its checkpoints: ddpforge ckpt ls",
                ],
            )
        earlier = self.opened.earlier
        if step == trainer.end and earlier is not None and earlier["state"] == "done":
            changes = [change for change in self.opened.changes if change.path != "train.length"]
            refuse_finished(self.folder.path, changes, self.opened.edited)

    def _begin(self, trainer: Trainer) -> dict[str, Any]:
        """Writes down that an attempt begins and starts the trackers; returns what checkpoints say of their origin."""
        step, strategy = trainer.progress.step, self.recipe.strategy.use
        attempt = self.folder.begin_attempt(step=step, **self.papers)
        plan = plan_batch(self.recipe.train, self.world.data.size)
        facts = {
            "attempt": attempt,
            "strategy": strategy,
            "total_steps": trainer.horizon.total,
            "steps_per_epoch": trainer.horizon.steps_per_epoch,
            "world_size": self.world.all.size,
            "micro_batch": plan.micro_batch,
            "accumulation": plan.accumulation,
            "device": str(self.world.device),
            "parameters": self.parts.size.all,
        }
        self.tracker.start(
            name=self.recipe.name,
            folder=self.folder.path,
            config=redacted(self.loaded.tables) | {"run": facts},
            resumed_at=step if attempt > 1 else None,
        )
        self.folder.write_status(self._status("running", begun=True))
        return {
            "recipe": self.papers["resolved"],
            "lineage": self.folder.lineage(),
            "strategy": strategy,
            "world_size": self.world.all.size,
        }

    # -- after the last one
    def _end(self, trainer: Trainer, state: State) -> Status:
        """Tells callbacks and trackers; when all ranks have come so far, writes the verdict."""
        self._tell_callbacks(None)
        self._finish_trackers(state)
        trainer.replica.close()
        leave(self.world)
        if self._watch:
            self._watch.stop()
        status = self._status(state)
        if self.world.is_main:
            self.folder.write_status(status)
        return status

    def _fail(self, error: BaseException) -> BaseException:
        """Writes down the failure, on the rank that met the first one; returns what this rank is to raise.

        What goes wrong here goes to the log: people must hear of `error`, or of the failure of another rank that
        `error` is no more than a symptom of.
        """
        if self._watch:
            self._watch.stop()
        # For the file alone: the command line shows it, or what caused it.
        log.error("training failed: %s", phrase(error), exc_info=error, extra={"in_file_only": True})
        code = _exit_code(error)
        report = self._failures.tell(error, code)
        cause = self._failures.explain() if report.symptom and not isinstance(error, PeerFailed) else None
        state: State = "diverged" if isinstance(error, Diverged) else "failed"
        speaks = not isinstance(error, PeerFailed) and self._write_failure(state, cause or report)

        while self._started:
            self._try(partial(self._tell_callbacks, error))
        self._try(partial(self._finish_trackers, state))
        if cause is None:
            self._attach(error, self._status(state, report), written_here=speaks)
            return error
        self._failures.end_frozen()
        told = self._told(cause, speaks=speaks)
        self._attach(told, self._status("failed", cause), written_here=speaks)
        return told

    def _write_failure(self, state: State, report: Report) -> bool:
        """True on the one rank that is the first to know."""
        first = False

        def write() -> None:
            nonlocal first
            first = self._failures.is_first(report)
            if first and not self._leaves_result(report):
                self.folder.write_status(self._status(state, report))

        self._try(write)
        return first

    def _leaves_result(self, report: Report) -> bool:
        """True where a run that has ended well was asked for what cannot be: that changes nothing about it."""
        earlier = self.opened.earlier
        refused = report.exit_code == ExitCode.USAGE and not self._begun
        return refused and earlier is not None and earlier["state"] in ("done", "stopped")

    def _told(self, cause: Report, *, speaks: bool) -> ForgeError:
        """The error for a rank that failed because another did; one rank shows it."""
        file = self.folder.logs / f"rank-{cause.rank}.log"
        shown = self.world.is_main or (speaks and cause.rank == 0)
        told = ForgeError if shown else partial(PeerFailed, ExitCode(cause.exit_code))
        error = told(f"rank {cause.rank} failed first: {cause.error}", hints=[f"see {file}"])
        error.exit_code = ExitCode(cause.exit_code)
        return error

    def _give_up(self, cause: Report) -> None:
        """Ends this process, from another thread: the one that trains waits where nobody can interrupt it."""
        log.error("rank %d failed: %s; this rank waits for something else, and is ended", cause.rank, cause.error)
        self._write_failure("failed", cause)
        with suppress(OSError), (self.folder.logs / f"rank-{self.world.all.rank}.log").open("a") as file:
            faulthandler.dump_traceback(file)
        record_verdict(cause.exit_code, spoke=False)
        logging.shutdown()
        _exit(cause.exit_code)

    # -- whoever is to know
    def _tell_callbacks(self, error: BaseException | None) -> None:
        while self._started:
            self._started.pop(0).on_end(error)

    def _finish_trackers(self, state: State) -> None:
        tracker, self.tracker = self.tracker, Tracker()
        tracker.finish(state=state, summary=self.trainer.metrics if self.trainer else {})

    @staticmethod
    def _try(duty: Callable[[], None]) -> None:
        try:
            duty()
        except Exception as another:
            expected = isinstance(another, ForgeError | OSError)
            log.warning("while the run was ending: %s", another, exc_info=None if expected else another)

    def _attach(self, error: BaseException, status: Status, *, written_here: bool) -> None:
        """Lets the command line show how the run stands: as the first rank that failed writes it down."""
        deadline = time.monotonic() + (0.0 if written_here or not self.world.is_main else _WRITING)
        with suppress(ForgeError):
            while (written := self.folder.status()) in (None, self.opened.earlier) or written["state"] == "running":
                if time.monotonic() >= deadline:
                    written = status
                    break
                time.sleep(0.02)
            status = written
        error.outcome = Outcome(self.folder.path, status, self.world.is_main)  # type: ignore[attr-defined]

    def _status(self, state: State, report: Report | None = None, *, begun: bool = False) -> Status:
        """How the run stands; before it goes on, where it stood."""
        codes = {"running": None, "done": ExitCode.DONE, "stopped": ExitCode.STOPPED}
        trainer = self.trainer if self._begun or begun else None
        earlier = self.opened.earlier
        return Status(
            state=state,
            exit_code=report.exit_code if report else codes.get(state, ExitCode.FAILED),
            step=trainer.progress.step if trainer else earlier["step"] if earlier else 0,
            samples=trainer.progress.samples if trainer else earlier["samples"] if earlier else 0,
            world_size=self.world.all.size,
            strategy=self.recipe.strategy.use,
            metrics=trainer.metrics if trainer else earlier["metrics"] if earlier else {},
            error=f"rank {report.rank}: {report.error}" if report else None,
        )


def _exit_code(error: BaseException) -> ExitCode:
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    step: int
    metrics: dict[str, float]
    is_main: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a metric that is not finite is null."""
        return {"step": self.step} | {name: x if math.isfinite(x) else None for name, x in self.metrics.items()}


@leaving.nobody_leaves()
def evaluate(folder: RunFolder, checkpoint: Path, *, sets: Sequence[str] = ()) -> Evaluation:
    """Evaluates one of a run's checkpoints on the recipe's `[data.eval]`; called on every rank.

    Averaged weights are used where the recipe's callbacks evaluate with them. Writes nothing.
    """
    parts = _load(folder.resolved, sets)
    world = _join(parts, trains=False)
    parts.recipe = recipe = _dealt_to(parts.recipe, world.data.size)
    parts.build()
    parts.report()
    checkpoints = _checkpoints(folder, recipe, world, _peers(recipe, world))
    with _hearing_how_it_ends() as started:
        trainer = assemble(parts, world, checkpoints, Tracker(), started=started)
        trainer.restore(Reader(checkpoint))
        if world.is_main:
            log.info("%s", _what_is_evaluated(checkpoint, parts))
        metrics = trainer.evaluate()
    trainer.replica.close()
    leave(world)
    return Evaluation(trainer.progress.step, metrics, world.is_main)


def _what_is_evaluated(checkpoint: Path, parts: Parts) -> str:
    """Which checkpoint, with whose weights, on how many samples."""
    averaging = [name for name, one in parts.callbacks.items() if type(one).evaluating is not Callback.evaluating]
    weights = f", with the weights of {', '.join(averaging)}" if averaging else ""
    samples = f", on {len(parts.sets[-1]):,} samples" if hasattr(parts.sets[-1], "__len__") else ""
    return f"evaluating {checkpoint}{weights}{samples}"


@contextmanager
def _hearing_how_it_ends() -> Iterator[list[Callback]]:
    """Tells callbacks, as far as they have started, how what is done with them ended."""
    started: list[Callback] = []
    try:
        yield started
    except BaseException as error:
        for callback in started:
            Attempt._try(partial(callback.on_end, error))
        raise
    for callback in started:
        callback.on_end(None)


def _load(source: str | Path, sets: Sequence[str]) -> Parts:
    registry = Registry.installed()
    return Parts(load_recipe(source, sets=sets, registry=registry), registry)


def _join(parts: Parts, *, trains: bool = True, folder: RunFolder | None = None) -> World:
    """Joins the world that the strategy finds, unless it is known already that the recipe cannot work in it."""
    parts.foresee(ranks=world_size(), trains=trains, folder=folder)
    if parts.found:
        parts.build(meta=True)  # nobody has joined: all that is wrong is told at once
        parts.rehearse()
    parts.report()
    joined = join(parts.recipe.train, parts.strategy)
    leaving.at_once()
    setup_logging(joined.all.rank)
    # What comes next may be refused on every rank: one that left now would end those that are still joining.
    joined.all.barrier()
    world = parts.strategy.setup(parts.recipe.train, joined)
    if trains:
        check_world(parts.loaded, world.data.size)
    return world


def _on_every_rank(peers: Peers, action: Callable[[], None]) -> None:
    """Does it on all ranks. Where one fails, all do, with its exit code; those that did not fail point to it."""
    mine: Exception | None = None
    try:
        action()
    except Exception as error:
        mine = error
    try:
        told = peers.ranks.everyone(None if mine is None else (phrase(mine), _exit_code(mine)))
    except RuntimeError as error:
        told = []
        if mine is None:
            raise ForgeError("another rank ended before training began: it was killed, or crashed") from error
    if mine is not None:
        raise mine
    for rank, word in enumerate(told):
        if word is not None:
            raise PeerFailed(word[1], f"rank {rank} failed first: {word[0]}")


def _build(parts: Parts, world: World, *, rehearses: bool) -> None:
    """Builds data and model; of a new run it tries out the first samples, too."""
    parts.build()
    if not parts.found:
        parts.open(world)
    if rehearses:
        parts.rehearse()
    parts.report()


def _dealt_to(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with a training batch that fits the ranks, for who does not train."""
    train = recipe.train
    micro = train.micro_batch or -(-train.global_batch // (train.elastic_shards or ranks))
    changes = {"micro_batch": micro, "global_batch": micro * ranks, "elastic_shards": None, "last_batch": "keep"}
    return recipe.model_copy(update={"train": train.model_copy(update=changes)})


def _peers(recipe: Recipe, world: World) -> Peers:
    return Peers.of(world.all, timedelta(seconds=recipe.train.timeout.seconds))


def _checkpoints(folder: RunFolder, recipe: Recipe, world: World, peers: Peers) -> Checkpoints:
    return Checkpoints(
        folder.checkpoints,
        recipe.checkpoint,
        peers=peers,
        ranks=world.all,
        before_commit=folder.sync_metrics,
    )


def _trackers(parts: Parts) -> Tracker:
    """The run's own record, the console, and what the recipe asks for."""
    ours = {name: parts.registry.load("tracker", name)() for name in ("jsonl", "console")}
    return Several(ours | parts.trackers)


# ---------------------------------------------------------------------------------------------- the run's folder
def _open(folder: RunFolder, papers: Papers, claims: ExitStack, *, fresh: bool, allow_change: Sequence[str]) -> _Opened:
    """Makes sure that the folder may be trained in, until `claims` ends."""
    token = secrets.token_hex(8)
    if fresh and folder.exists():
        with folder.claim():
            log.info("the earlier run is kept as %s", folder.retire())
    if not folder.exists() and claims.enter_context(folder.claim_new(**papers)):
        return _Opened(token)

    earlier = folder.status()
    changes = recipe_changes(folder.tables(), tomllib.loads(papers["resolved"]))
    edited = _edited(folder, papers)
    if earlier and earlier["state"] == "done" and not any(change.path == "train.length" for change in changes):
        refuse_finished(folder.path, changes, edited)
        log.info("%s is finished; --fresh trains it anew, a longer train.length goes on with it", folder.path)
        return _Opened(token, result=earlier)

    claims.enter_context(folder.claim())
    _settle_changes(folder, changes, edited, allow_change)
    Failures.clear(folder.logs)
    return _Opened(token, earlier, changes=changes, edited=edited)


def _edited(folder: RunFolder, papers: Papers) -> list[str]:
    """The names of local files whose code is not what the last attempt used."""
    kept = {name: folder.path / name for name in papers["local_files"]}
    return [
        Path(name).name
        for name, code in papers["local_files"].items()
        if kept[name].is_file() and kept[name].read_bytes() != code
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


def _mention_what_is_lost(folder: RunFolder) -> None:
    """A run that begins anew, because it has no checkpoint, does not do so behind anybody's back."""
    status = folder.status()
    if status is not None and status["step"]:
        log.warning(
            "%s has no checkpoints: training begins anew, and an earlier attempt had come to step %d",
            folder.path,
            status["step"],
        )
