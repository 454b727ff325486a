"""The composition root: a recipe in, a trained model out. The story of a run, told once."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from ddpforge.checkpoint import Checkpoints
from ddpforge.console import setup_logging
from ddpforge.data import Batches, Share, mix, open_data
from ddpforge.durations import Horizon
from ddpforge.errors import Diverged, ExitCode, ForgeError, PeerFailed, UsageError
from ddpforge.interfaces import Callback, Strategy, Task, Tracker, World
from ddpforge.optim.groups import parameter_groups
from ddpforge.recipe import LoadedRecipe, Recipe, load_recipe
from ddpforge.recipe.batch import plan_batch
from ddpforge.registry import Registry
from ddpforge.runfolder import RunFolder
from ddpforge.trackers.several import Several
from ddpforge.trainer import Trainer

__all__ = ["Outcome", "assemble", "run"]

T = TypeVar("T")
log = logging.getLogger("ddpforge")

_WEIGHTS = 0x1217       # keeps the random numbers of initial weights apart from all others


@dataclass(frozen=True)
class Outcome:
    """How a run ended, as its `status.json` says it."""

    folder: Path
    status: Mapping[str, Any]
    is_main: bool

    @property
    def exit_code(self) -> ExitCode:
        """What the process should end with."""
        return ExitCode(self.status["exit_code"])


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
    plan_batch(recipe.train, world.data_size)

    folder = RunFolder(Path(out or recipe.output_dir) / recipe.name)
    finished = _on_main(strategy, world, lambda: _open(folder, loaded, fresh, allow_change))
    if finished:
        return Outcome(folder.path, finished, world.is_main)
    setup_logging(world.rank, folder.path)

    checkpoints = Checkpoints(
        folder.checkpoints, keep=recipe.checkpoint.keep, is_main=world.is_main, broadcast=strategy.broadcast
    )
    tracker = _trackers(recipe, registry) if world.is_main else Tracker()
    ending = _Ending(folder, world, recipe)
    try:
        trainer = assemble(loaded, registry, strategy, world, checkpoints, tracker)
        checkpoint = checkpoints.load()
        if checkpoint:
            trainer.restore(checkpoint)
        ending.trainer = trainer

        tracker.start(
            name=recipe.name,
            folder=folder.path,
            config=loaded.tables | {"run": _facts(trainer)},
            resumed_at=checkpoint.step if checkpoint else None,
        )
        ending.write("running")
        state = trainer.fit()
    except BaseException as error:
        ending.failed(error)
        raise

    status = ending.write(state)
    strategy.close()
    return Outcome(folder.path, status, world.is_main)


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
        origin={"recipe": loaded.dumps(), "strategy": recipe.strategy.use, "world_size": world.size},
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


def _facts(trainer: Trainer) -> dict[str, Any]:
    """What trackers want to know of a run beyond its recipe."""
    return {
        "total_steps": trainer.horizon.total,
        "steps_per_epoch": trainer.horizon.steps_per_epoch,
        "world_size": trainer.world.size,
        "device": str(trainer.world.device),
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
    }


# ---------------------------------------------------------------------------------------------- the run's folder
def _open(
    folder: RunFolder, loaded: LoadedRecipe, fresh: bool, allow_change: Sequence[str]
) -> Mapping[str, Any] | None:
    """Creates the run's folder or goes on with it (rank 0). Returns the status of a run that is finished already."""
    if fresh and folder.exists():
        log.info("an earlier run was set aside as %s", folder.retire())
    if not folder.exists():
        folder.create(loaded)
        return None
    ...
    return None


def _on_main(strategy: Strategy, world: World, action: Callable[[], T]) -> T:
    """What `action` returns on rank 0, on every rank; when it fails there, every rank fails."""
    result: T | None = None
    error: ForgeError | None = None
    if world.is_main:
        try:
            result = action()
        except ForgeError as caught:
            error = caught

    result, failed = strategy.broadcast((result, error.exit_code if error else None))
    if error:
        raise error
    if failed is not None:
        raise PeerFailed(failed)
    return result  # type: ignore[return-value]


class _Ending:
    """Writes down how the run stands and how it ended."""

    def __init__(self, folder: RunFolder, world: World, recipe: Recipe) -> None:
        self.folder, self.world, self.recipe = folder, world, recipe
        self.trainer: Trainer | None = None

    def write(self, state: str, error: BaseException | None = None) -> dict[str, Any]:
        """`status.json` (rank 0, or the first rank to fail), and the same as a dictionary on every rank."""
        ...
