"""The composition root: a recipe in, a trained model out. The story of a run, told once."""

from __future__ import annotations

import logging
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch

from ddpforge.checkpoint.format import read
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.console import setup_logging
from ddpforge.data import Batches, Share, mix, open_data
from ddpforge.durations import Horizon
from ddpforge.errors import Diverged, ExitCode, ForgeError, PeerFailed, UsageError
from ddpforge.interfaces import Callback, Strategy, Task, Tracker, World
from ddpforge.optim.groups import parameter_groups
from ddpforge.recipe import LoadedRecipe, Recipe, load_recipe
from ddpforge.recipe.batch import check_world, plan_batch
from ddpforge.registry import Registry
from ddpforge.runfolder import RunFolder, Status, recipe_changes, refuse_fixed
from ddpforge.trackers.several import Several
from ddpforge.trainer import Trainer

__all__ = ["Evaluation", "Outcome", "evaluate", "run"]

T = TypeVar("T")
State = Literal["running", "done", "failed", "stopped", "diverged"]
log = logging.getLogger("ddpforge")

_WEIGHTS = 0x1217       # keeps the random numbers of initial weights apart from all others


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
    loaded = load_recipe(source, sets=sets)
    recipe, registry = loaded.recipe, Registry.installed()

    strategy: Strategy = registry.build("strategy", recipe.strategy)
    world = strategy.setup(recipe.train)
    setup_logging(world.rank)
    check_world(loaded, world.data_size)

    folder = RunFolder(Path(out or recipe.output_dir) / recipe.name)
    finished = _on_main(strategy, world, lambda: _open(folder, loaded, fresh=fresh, allow_change=allow_change))
    if finished:
        return Outcome(folder.path, finished, world.is_main)

    setup_logging(world.rank, folder.path)
    checkpoints = Checkpoints(
        folder.checkpoints, keep=recipe.checkpoint.keep, is_main=world.is_main, broadcast=strategy.broadcast
    )
    tracker = _trackers(recipe, registry) if world.is_main else Tracker()
    trainer = None
    try:
        trainer = assemble(loaded, registry, strategy, world, checkpoints, tracker)
        checkpoint = checkpoints.load()
        if checkpoint:
            trainer.restore(checkpoint)
        _on_main(strategy, world, lambda: _begin(folder, loaded, trainer, tracker))
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
    loaded = load_recipe(folder.resolved, sets=sets)
    recipe, registry = loaded.recipe, Registry.installed()
    strategy: Strategy = registry.build("strategy", recipe.strategy)
    world = strategy.setup(recipe.train)
    setup_logging(world.rank)
    check_world(loaded, world.data_size)

    checkpoints = Checkpoints(
        folder.checkpoints, keep=recipe.checkpoint.keep, is_main=world.is_main, broadcast=strategy.broadcast
    )
    trainer = assemble(loaded, registry, strategy, world, checkpoints, Tracker())
    trainer.restore(read(checkpoint))
    metrics = trainer.evaluate()
    strategy.close()
    return Evaluation(trainer.progress.step, metrics, world.is_main)


def assemble(
    loaded: LoadedRecipe,
    registry: Registry,
    strategy: Strategy,
    world: World,
    checkpoints: Checkpoints,
    tracker: Tracker,
) -> Trainer:
    """Builds everything a recipe names and puts it together; `strategy` has been set up."""
    recipe = loaded.recipe
    training, evaluation, dataset = _data(recipe, registry, world)
    horizon = _horizon(recipe, training)
    task: Task = registry.build("task", recipe.task)

    # The same initial weights on every rank. The order matters: a strategy shards or replaces the model before an
    # optimizer is built from its parameters, for an optimizer of the old ones would train nothing.
    torch.manual_seed(mix(recipe.train.seed, _WEIGHTS))
    with strategy.building():
        bare = registry.build("model", recipe.model)
    task.check(bare, dataset)
    model = strategy.wrap(bare)
    groups = parameter_groups(model, recipe.optimizer.no_decay)
    optimizer = registry.build("optimizer", recipe.optimizer, params=groups)
    model, optimizer = strategy.prepare(model, optimizer)

    callbacks: dict[str, Callback] = {
        name: registry.build("callback", component) for name, component in recipe.callbacks.items()
    }
    for callback in callbacks.values():
        callback.on_start(strategy.unwrap(model), world)

    return Trainer(
        recipe=recipe,
        world=world,
        strategy=strategy,
        task=task,
        model=model,
        optimizer=optimizer,
        schedule=registry.build("schedule", recipe.schedule, horizon=horizon),
        horizon=horizon,
        training=training,
        evaluation=evaluation,
        callbacks=callbacks,
        checkpoints=checkpoints,
        tracker=tracker,
        origin={"recipe": _papers(loaded)["resolved"], "strategy": recipe.strategy.use, "world_size": world.size},
    )


def _data(recipe: Recipe, registry: Registry, world: World) -> tuple[Batches, Batches | None, Any]:
    """The training batches, the evaluation batches, and the training dataset itself."""
    train, data = recipe.train, recipe.data
    plan = plan_batch(train, world.data_size)
    fetching: dict[str, Any] = {
        "seed": train.seed,
        "workers": data.workers,
        "prefetch": data.prefetch,
        "pin": world.device.type == "cuda",
    }

    dataset = registry.build("data", data.train, seed=train.seed)
    training = open_data(
        dataset,
        global_batch=plan.global_batch,
        share=Share(world.data_rank, world.data_size, plan.micro_batch),
        shuffle=True,
        drop_last=train.last_batch == "drop",
        **fetching,
    )
    if data.eval is None:
        return training, None, dataset

    batch = train.eval_batch or plan.micro_batch
    evaluation = open_data(
        registry.build("data", data.eval, seed=train.seed),
        global_batch=batch * world.data_size,
        share=Share(world.data_rank, world.data_size, batch),
        shuffle=False,
        drop_last=False,
        **fetching,
    )
    return training, evaluation, dataset


def _horizon(recipe: Recipe, training: Batches) -> Horizon:
    length = recipe.train.length
    horizon = Horizon(None, training.steps_per_epoch)
    try:
        return horizon if length.is_time else Horizon(horizon.steps(length), horizon.steps_per_epoch)
    except ValueError as error:
        raise UsageError(f"train.length: {error}", hints=['write train.length in steps, e.g. "1000st"']) from None


def _trackers(recipe: Recipe, registry: Registry) -> Tracker:
    """The run's own record, the console, and what the recipe asks for; rank 0 only."""
    ours = {name: registry.load("tracker", name)() for name in ("jsonl", "console")}
    asked = {name: registry.build("tracker", component) for name, component in recipe.track.trackers.items()}
    return Several(ours | asked)


def _facts(recipe: Recipe, trainer: Trainer) -> dict[str, Any]:
    """What trackers want to know of a run beyond its recipe."""
    return {
        "strategy": recipe.strategy.use,
        "total_steps": trainer.horizon.total,
        "steps_per_epoch": trainer.horizon.steps_per_epoch,
        "world_size": trainer.world.size,
        "device": str(trainer.world.device),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


# ---------------------------------------------------------------------------------------------- the run's folder
def _open(
    folder: RunFolder, loaded: LoadedRecipe, *, fresh: bool, allow_change: Sequence[str]
) -> Status | None:
    """Makes sure that the folder may be trained in; returns the status of a run that is finished already."""
    if fresh and folder.exists():
        log.info("the earlier run is kept as %s", folder.retire())
    if not folder.exists():
        folder.create(**_papers(loaded))
        return None

    changes = recipe_changes(folder.tables(), tomllib.loads(_papers(loaded)["resolved"]))
    refuse_fixed(changes, allow_change)
    for change in changes:
        log.info("changed since the last attempt: %s", change)

    status = folder.status()
    if status is None or status["state"] != "done" or any(change.path == "train.length" for change in changes):
        return None
    log.info("%s is finished; --fresh trains it anew, a longer train.length goes on with it", folder.path)
    return status


def _papers(loaded: LoadedRecipe) -> dict[str, Any]:
    """The recipe as a run's folder keeps it: as given, resolved, and with its own copies of local code."""
    copies = {file: f"code/{number}/{file.name}" for number, file in enumerate(loaded.local_files())}
    local_files = {name: file for file, name in copies.items()}
    return {"text": loaded.text, "resolved": loaded.dumps(copies), "local_files": local_files}


def _begin(folder: RunFolder, loaded: LoadedRecipe, trainer: Trainer, tracker: Tracker) -> None:
    """Writes down that an attempt begins, and starts the trackers (rank 0)."""
    step = trainer.progress.step
    attempt = folder.begin_attempt(step=step, **_papers(loaded))
    trainer.origin = {**trainer.origin, "lineage": folder.lineage()}
    tracker.start(
        name=loaded.recipe.name,
        folder=folder.path,
        config=loaded.tables | {"run": _facts(loaded.recipe, trainer)},
        resumed_at=step if attempt > 1 else None,
    )
    folder.write_status(_status("running", trainer.world, loaded.recipe, trainer))


def _ended(
    folder: RunFolder, world: World, recipe: Recipe, trainer: Trainer, tracker: Tracker, state: State
) -> Status:
    """Tells callbacks and trackers, then writes the verdict."""
    for callback in trainer.callbacks.values():
        callback.on_end(None)
    status = _status(state, world, recipe, trainer)
    tracker.finish(state=state, summary=trainer.metrics)
    if world.is_main:
        folder.write_status(status)
    return status


def _failed(
    folder: RunFolder,
    world: World,
    recipe: Recipe,
    trainer: Trainer | None,
    tracker: Tracker,
    error: BaseException,
) -> None:
    """Writes down the failure, by whichever rank meets one first: its peers fail after it, and only because of it."""
    state: State = "diverged" if isinstance(error, Diverged) else "failed"
    for callback in trainer.callbacks.values() if trainer else ():
        callback.on_end(error)
    tracker.finish(state=state, summary=trainer.metrics if trainer else {})
    if _is_first(folder):
        folder.write_status(_status(state, world, recipe, trainer, error))


def _is_first(folder: RunFolder) -> bool:
    """True on the first rank that fails: whoever creates the file."""
    attempt = folder.attempts()
    try:
        (folder.path / "logs" / f"failure-{attempt}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _status(
    state: State, world: World, recipe: Recipe, trainer: Trainer | None, error: BaseException | None = None
) -> Status:
    codes = {"running": None, "done": ExitCode.DONE, "stopped": ExitCode.STOPPED}
    code = error.exit_code if isinstance(error, ForgeError) else codes.get(state, ExitCode.FAILED)
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


def _on_main(strategy: Strategy, world: World, action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank; when it fails there, every rank fails."""
    result: T | None = None
    error: ForgeError | None = None
    if world.is_main:
        try:
            result = action()
        except ForgeError as caught:
            error = caught

    result, code = strategy.broadcast((result, error.exit_code if error else None))
    if error:
        raise error
    if code is not None:
        raise PeerFailed(code)
    return cast(T, result)
