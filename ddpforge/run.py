"""The composition root: a recipe in, a trained model out. The story of a run, told once."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from os import getpid
from pathlib import Path
from socket import gethostname
from typing import Any

from ddpforge.agree import on_main
from ddpforge.assemble import assemble
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.peers import Peers
from ddpforge.checkpoint.reader import Reader
from ddpforge.console import setup_logging
from ddpforge.environment import world_size
from ddpforge.errors import Diverged, ExitCode, ForgeError, PeerFailed
from ddpforge.interfaces import Strategy, Tracker, World
from ddpforge.parts import Parts
from ddpforge.recipe import LoadedRecipe, Recipe, load_recipe
from ddpforge.recipe.batch import check_world
from ddpforge.registry import Registry
from ddpforge.runfolder import Papers, RunFolder, State, Status, papers_of, recipe_changes, refuse_fixed
from ddpforge.trackers.several import Several
from ddpforge.trainer import Trainer

__all__ = ["Evaluation", "Outcome", "evaluate", "run"]

log = logging.getLogger("ddpforge")

_SLOWEST_WRITE = 3600.0  # seconds


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
    if is_new:
        _build(parts)
    papers = papers_of(parts.loaded)
    with ExitStack() as claims:
        finished = on_main(
            lambda: _open(folder, papers, claims, fresh=fresh, allow_change=allow_change),
            is_main=world.is_main,
            broadcast=parts.strategy.broadcast,
        )
        if finished:
            return Outcome(folder.path, finished, world.is_main)
        return _train(folder, parts, papers, world, is_built=is_new)


def _train(folder: RunFolder, parts: Parts, papers: Papers, world: World, *, is_built: bool) -> Outcome:
    """One attempt."""
    loaded, recipe, strategy = parts.loaded, parts.recipe, parts.strategy
    setup_logging(world.rank, folder.path)
    log.debug("rank %d of %d on %s, device %s, pid %d", world.rank, world.size, gethostname(), world.device, getpid())
    tracker = _trackers(parts) if world.is_main else Tracker()
    trainer = None
    try:
        if not is_built:
            _build(parts)
        checkpoints = _checkpoints(folder, recipe, strategy, world)
        checkpoint = checkpoints.open()
        if checkpoint is None and world.is_main:
            _mention_what_is_lost(folder)
        init_from = None if checkpoint else recipe.checkpoint.init_from
        trainer = assemble(parts, world, checkpoints, tracker, init_from=init_from)
        if checkpoint:
            trainer.restore(checkpoint)
        trainer.origin = on_main(
            lambda: _begin(folder, loaded, papers, trainer, tracker),
            is_main=world.is_main,
            broadcast=strategy.broadcast,
        )
        state = trainer.fit()
    except BaseException as error:
        _failed(folder, world, recipe, trainer, tracker, error)
        raise

    status = _ended(folder, world, recipe, trainer, tracker, state)
    strategy.close()
    return Outcome(folder.path, status, world.is_main)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    step: int
    metrics: dict[str, float]
    is_main: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a metric that is not finite is null."""
        return {"step": self.step} | {name: x if math.isfinite(x) else None for name, x in self.metrics.items()}


def evaluate(folder: RunFolder, checkpoint: Path, *, sets: Sequence[str] = ()) -> Evaluation:
    """Evaluates one of a run's checkpoints on the recipe's `[data.eval]`; called on every rank.

    Averaged weights are used where the recipe's callbacks evaluate with them. Writes nothing.
    """
    parts = _load(folder.resolved, sets)
    world = _join(parts, trains=False)
    parts.recipe = recipe = _dealt_to(parts.recipe, world.data_size)
    parts.build()
    parts.report()
    checkpoints = _checkpoints(folder, recipe, parts.strategy, world)
    trainer = assemble(parts, world, checkpoints, Tracker())
    trainer.restore(Reader(checkpoint))
    metrics = trainer.evaluate()
    parts.strategy.close()
    return Evaluation(trainer.progress.step, metrics, world.is_main)


def _load(source: str | Path, sets: Sequence[str]) -> Parts:
    registry = Registry.installed()
    return Parts(load_recipe(source, sets=sets, registry=registry), registry)


def _join(parts: Parts, *, trains: bool = True, folder: RunFolder | None = None) -> World:
    """Joins the world that the strategy finds, unless it is known already that the recipe cannot work in it."""
    parts.foresee(ranks=world_size(), trains=trains, folder=folder)
    if parts.found:
        parts.build(meta=True)  # nobody has joined: all that is wrong is told at once
        parts.try_out(strict=False)
    parts.report()
    world = parts.strategy.setup(parts.recipe.train)
    setup_logging(world.rank)
    if trains:
        check_world(parts.loaded, world.data_size)
    return world


def _build(parts: Parts) -> None:
    parts.build()
    parts.try_out(strict=False)
    parts.report()


def _dealt_to(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with a training batch that fits the ranks, for who does not train."""
    train = recipe.train
    micro = train.micro_batch or -(-train.global_batch // (train.elastic_shards or ranks))
    changes = {"micro_batch": micro, "global_batch": micro * ranks, "elastic_shards": None, "last_batch": "keep"}
    return recipe.model_copy(update={"train": train.model_copy(update=changes)})


def _checkpoints(folder: RunFolder, recipe: Recipe, strategy: Strategy, world: World) -> Checkpoints:
    # A rank that is gone is noticed at once; one that writes to a slow disk needs time.
    peers = Peers.of(world, timedelta(seconds=max(_SLOWEST_WRITE, recipe.train.timeout.seconds)))
    return Checkpoints(folder.checkpoints, recipe.checkpoint, peers=peers, broadcast=strategy.broadcast)


def _trackers(parts: Parts) -> Tracker:
    """The run's own record, the console, and what the recipe asks for."""
    ours = {name: parts.registry.load("tracker", name)() for name in ("jsonl", "console")}
    return Several(ours | parts.trackers)


# ---------------------------------------------------------------------------------------------- the run's folder
def _open(
    folder: RunFolder, papers: Papers, claims: ExitStack, *, fresh: bool, allow_change: Sequence[str]
) -> Status | None:
    """Makes sure that the folder may be trained in, until `claims` ends; returns the status of a run that is finished
    already."""
    if fresh and folder.exists():
        with folder.claim():
            log.info("the earlier run is kept as %s", folder.retire())
    if not folder.exists():
        folder.create(**papers)
        claims.enter_context(folder.claim())
        return None

    changes = recipe_changes(folder.tables(), tomllib.loads(papers["resolved"]))
    refuse_fixed(changes, allow_change)
    for change in changes:
        log.info("changed since the last attempt: %s", change)
    for name, code in papers["local_files"].items():
        kept = folder.path / name
        if kept.is_file() and kept.read_bytes() != code:
            log.info("changed since the last attempt: the code in %s", Path(name).name)

    status = folder.status()
    if status is None or status["state"] != "done" or any(change.path == "train.length" for change in changes):
        claims.enter_context(folder.claim())
        return None
    log.info("%s is finished; --fresh trains it anew, a longer train.length goes on with it", folder.path)
    return status


def _mention_what_is_lost(folder: RunFolder) -> None:
    """A run that begins anew, because it has no checkpoint, does not do so behind anybody's back."""
    status = folder.status()
    if status is not None and status["step"]:
        log.warning(
            "%s has no checkpoints: training begins anew, and an earlier attempt had come to step %d",
            folder.path,
            status["step"],
        )


def _begin(
    folder: RunFolder, loaded: LoadedRecipe, papers: Papers, trainer: Trainer, tracker: Tracker
) -> dict[str, Any]:
    """Writes down that an attempt begins and starts the trackers; returns what checkpoints say of their origin."""
    step, strategy = trainer.progress.step, loaded.recipe.strategy.use
    attempt = folder.begin_attempt(step=step, **papers)
    facts = {
        "strategy": strategy,
        "total_steps": trainer.horizon.total,
        "steps_per_epoch": trainer.horizon.steps_per_epoch,
        "world_size": trainer.world.size,
        "device": str(trainer.world.device),
        "parameters": trainer.parameters,
    }
    tracker.start(
        name=loaded.recipe.name,
        folder=folder.path,
        config=loaded.tables | {"run": facts},
        resumed_at=step if attempt > 1 else None,
    )
    folder.write_status(_status("running", trainer.world, loaded.recipe, trainer))
    return {
        "recipe": papers["resolved"],
        "lineage": folder.lineage(),
        "strategy": strategy,
        "world_size": trainer.world.size,
    }


def _ended(folder: RunFolder, world: World, recipe: Recipe, trainer: Trainer, tracker: Tracker, state: State) -> Status:
    """Tells callbacks and trackers, then writes the verdict."""
    for callback in trainer.callbacks.values():
        callback.on_end(None)
    tracker.finish(state=state, summary=trainer.metrics)
    status = _status(state, world, recipe, trainer)
    if world.is_main:
        folder.write_status(status)
    return status


def _failed(
    folder: RunFolder, world: World, recipe: Recipe, trainer: Trainer | None, tracker: Tracker, error: BaseException
) -> None:
    """Writes down the failure, on whichever rank meets one first: its peers fail later, and only because of it.

    What goes wrong here goes to the log: `error` is what people must hear of.
    """
    state: State = "diverged" if isinstance(error, Diverged) else "failed"

    def write() -> None:
        if _is_first(folder, error):
            folder.write_status(_status(state, world, recipe, trainer, error))

    duties: list[Callable[[], None]] = [
        *(partial(callback.on_end, error) for callback in (trainer.callbacks.values() if trainer else ())),
        partial(tracker.finish, state=state, summary=trainer.metrics if trainer else {}),
        write,
    ]
    for duty in duties:
        try:
            duty()
        except Exception as another:
            expected = isinstance(another, ForgeError | OSError)
            log.warning("while the run was ending: %s", another, exc_info=None if expected else another)


def _is_first(folder: RunFolder, error: BaseException) -> bool:
    if isinstance(error, PeerFailed):
        return False  # rank 0 writes what it was
    try:
        (folder.path / "logs" / f"failure-{folder.attempts()}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _status(
    state: State, world: World, recipe: Recipe, trainer: Trainer | None, error: BaseException | None = None
) -> Status:
    codes = {"running": None, "done": ExitCode.DONE, "stopped": ExitCode.STOPPED}
    code = error.exit_code if isinstance(error, ForgeError) else codes.get(state, ExitCode.FAILED)
    if isinstance(error, KeyboardInterrupt):
        code = ExitCode.INTERRUPTED
    return Status(
        state=state,
        exit_code=code,
        step=trainer.progress.step if trainer else 0,
        samples=trainer.progress.samples if trainer else 0,
        world_size=world.size,
        strategy=recipe.strategy.use,
        metrics=trainer.metrics if trainer else {},
        error=f"rank {world.rank}: {type(error).__name__}: {error}" if error else None,
    )
