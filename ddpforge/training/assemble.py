"""Puts what a recipe names together: into a trainer, or into an evaluator of what was trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.errors import ForgeError, PluginError, recipe_faults
from ddpforge.interfaces import Callback, CanonicalState, Replica, RunContext, SavedTensor, Task, Tracker, World
from ddpforge.interop.initial import load_initial
from ddpforge.ranks.leaving import nobody_leaves
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.batchnorm import watch_batchnorm
from ddpforge.training.beside import place
from ddpforge.training.blocks import find_blocks, rework_blocks
from ddpforge.training.contract import contract_of, prove
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.fingerprint import compare_built, refuse_other_groups
from ddpforge.training.float8 import put_float8
from ddpforge.training.left_out import has_left_out
from ddpforge.training.loop import Trainer
from ddpforge.training.memory_format import check_channels_last, put_channels_last
from ddpforge.training.optimizers import build_optimizer
from ddpforge.training.parameter_groups import here, hold_statistics, parameter_groups
from ddpforge.training.restoring import restore_callbacks, restore_kept, restore_weights
from ddpforge.training.shows import Shows
from ddpforge.training.stages import Built, Dealt
from ddpforge.training.task_checks import SMALL
from ddpforge.training.task_state import NAME, TaskState, Unsaved, has_state, refuse_parameters
from ddpforge.training.turns import draws_of
from ddpforge.training.whole import keep_whole

__all__ = ["assemble", "compile_losses", "ending", "evaluating"]

log = logging.getLogger("ddpforge")


def assemble(
    parts: Dealt,
    world: World,
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    folder: Path,
    life: ExitStack,
    init_from: str | None = None,
    begins: bool = True,
    trained: bool = False,
) -> Trainer:
    """A trainer out of `parts`, which are built, in `world`, which their strategy has set up; nothing is restored yet.

    `folder` is the run's; `init_from` is where initial weights come from, see `interop.initial`. Where a run does not
    begin, but resumes from a checkpoint, modules beside the model wait for that. Unless steps were `trained` already,
    the first is preceded by a comparison with the whole model, see `whole`. Callbacks that have started hear how it
    ended when `life` does, also when a later one fails.

    Raises UsageError for parts that do not fit together, PluginError for a broken one.
    """
    recipe = parts.recipe
    whole = None if trained else keep_whole(parts, contract_of(parts.strategy), world)
    model = _spread(parts)
    with recipe_faults():
        watch_batchnorm(model, *parts.training.fewest(_batches(parts)))
        turns, blocks = list(parts.turns), recipe.train.blocks
        optimizer = build_optimizer(parts.registry, recipe.optimizer, model, turns, blocks)
    refuse_other_groups(world.all, model, optimizer)
    replica = _prepared(parts, world, model, optimizer)
    if init_from:
        _initialise(replica, init_from, world, skip=recipe.checkpoint.init_ignore)
    beside = _beside(parts, world, replica, begins=begins)
    shows = Shows(tracker, is_main=world.is_main)
    parts.task.show = shows  # type: ignore[method-assign]
    _start(parts, world, replica, shows, folder, life)

    return Trainer(
        recipe=recipe,
        world=world,
        replica=replica,
        task=parts.task,
        optimizer=optimizer,
        compares=not trained and _compares(parts),
        schedules=parts.schedules,
        plan=parts.plan,
        training=parts.training,
        evaluator=_evaluator(parts, world, replica, beside, parts.callbacks),
        callbacks={**beside, **parts.callbacks},
        unsaved=Unsaved(parts.task, replica.bare, parts.beside, beside.get(NAME), is_main=world.is_main),
        checkpoints=checkpoints,
        tracker=tracker,
        shows=shows,
        whole=whole,
    )


@contextmanager
def evaluating(
    parts: Dealt, world: World, checkpoint: Reader, folder: Path, *, weights: str | None = None
) -> Iterator[Evaluator]:
    """An evaluator out of `parts`, which are built, with the weights of `checkpoint` and its callbacks' state.

    `folder` is the run's; what callbacks show is not kept. `weights` are others than callbacks would evaluate with:
    "model", or those that the callback of that name keeps.

    A strategy prepares a model together with an optimizer: it gets SGD, which keeps nothing. Callbacks that have
    started hear how it ended. Raises what `assemble` raises, and CheckpointError where the checkpoint does not fit.
    """
    compare_built(parts, world)
    with ExitStack() as life:
        model = _spread(parts)
        with recipe_faults():
            groups = here(parameter_groups(model, ()))
        replica = _prepared(parts, world, model, SGD(groups, lr=0.0))
        beside = _beside(parts, world, replica, begins=False)
        _start(parts, world, replica, Shows(Tracker(), is_main=world.is_main), folder, life)
        if has_left_out(checkpoint.facts.loop) and (source := parts.recipe.checkpoint.init_from):
            _initialise(replica, source, world, skip=parts.recipe.checkpoint.init_ignore)
        restore_weights(replica, checkpoint, world.all)
        restore_callbacks(parts.recipe, {**beside, **parts.callbacks}, checkpoint, world)
        if weights is not None:
            restore_kept(replica, checkpoint, weights)
        yield _evaluator(parts, world, replica, beside, parts.callbacks if weights is None else {})
        replica.close()


# ---------------------------------------------------------------------------------------------- what both are made of
def _beside(parts: Dealt, world: World, replica: Replica, *, begins: bool) -> dict[str, Callback]:
    """Returns what checkpoints hold of the task, by name: modules beside the model, and its own state."""
    found: dict[str, Callback] = {**place(parts.beside, parts.strategy, replica, world, begins=begins)}
    return {**found, NAME: TaskState(parts.task, replica, world.all)} if has_state(parts.task) else found


def _spread(parts: Built) -> nn.Module:
    """The model as the strategy lays it over ranks.

    An optimizer is built afterwards: one of the parameters before would train nothing.
    """
    train = parts.recipe.train
    with recipe_faults():
        blocks = find_blocks(parts.model, train.blocks)
        put_float8(parts.model, blocks, train)
        rework_blocks(blocks, train)
        bare = parts.model
        if train.sync_batchnorm:
            bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)  # type: ignore[no-untyped-call]
        hold_statistics(bare, train.freeze)
        if train.channels_last:
            put_channels_last(bare)
        return parts.strategy.wrap(bare, blocks)


def _batches(parts: Dealt) -> int | None:
    """Counts the global batches of the run; None where that is not known."""
    total = parts.plan.horizon.total
    return total and total * draws_of(parts.turns)


def _prepared(parts: Built, world: World, model: nn.Module, optimizer: Optimizer) -> Replica:
    """Has the strategy prepare both; proves that the replica is what the strategy promises."""
    strategy = parts.strategy
    replica = strategy.prepare(model, optimizer)
    if parts.recipe.train.channels_last:
        check_channels_last(replica.bare, parts.recipe.strategy.use)
    prove(contract_of(strategy), type(strategy).__name__, world, replica.weights, parts.size)
    return replica


def _initialise(replica: Replica, source: str, world: World, *, skip: Sequence[str]) -> None:
    """Gives the model initial weights from elsewhere."""
    state = replica.state()

    def take(saved: Mapping[str, SavedTensor]) -> None:
        replica.load_state(CanonicalState(saved, {}), partial=True)
        replica.weights.changed()

    load_initial(source, state.model, state.aliases, take, world.all, skip=skip)


def _start(parts: Dealt, world: World, replica: Replica, shows: Shows, folder: Path, life: ExitStack) -> None:
    run = RunContext(
        model=replica.bare,
        world=world,
        weights=replica.weights,
        folder=folder,
        forward=replica.forward,
        show=shows,
        gradients=replica.gradients_by_name,
    )
    parts.task.start(replica.bare, world)
    if parts.trains:
        refuse_parameters(parts.task, replica.bare, parts.beside.values())
    compile_losses(parts.task, parts.recipe.train)
    for callback in parts.callbacks.values():
        callback.on_start(run)
        life.push(ending(callback.on_end))


def ending(duty: Callable[[BaseException | None], None]) -> Callable[[object, BaseException | None, object], None]:
    """A duty for an ExitStack, which is told what failed; where something has, its own failure goes to the log."""

    def end(_: object, error: BaseException | None, __: object) -> None:
        try:
            with nobody_leaves():
                duty(error)
        except Exception as failure:
            if error is None:
                raise
            expected = isinstance(failure, ForgeError | OSError)
            log.warning("while the run was ending: %s", failure, exc_info=None if expected else failure)

    return end


def _evaluator(
    parts: Dealt,
    world: World,
    replica: Replica,
    beside: Mapping[str, Callback],
    callbacks: Mapping[str, Callback],
) -> Evaluator:
    return Evaluator(
        world=world,
        replica=replica,
        task=parts.task,
        sets=parts.evaluation,
        callbacks={**beside, **callbacks},
        seed=parts.recipe.train.seed,
    )


def _compares(parts: Dealt) -> bool:
    """True if the first loss is still to be compared with that of its halves, in a copy of the model, in a moment."""
    whole = "weights" not in contract_of(parts.strategy).shards and parts.recipe.train.compile == "off"
    return parts.compares and not parts.task.whole_batch and whole and parts.size.all <= SMALL


def compile_losses(task: Task, train: TrainSection) -> None:
    """Compiles the methods in `task.compiles` where the recipe compiles the model; raises PluginError for no method.

    Without CUDA graphs, whatever the mode: those of the model hold its outputs only until it is called again.
    """
    for name in task.compiles if train.compile != "off" else ():
        method = getattr(task, name, None)
        if not callable(method):
            raise PluginError(f"{type(task).__name__}.compiles names `{name}`, which is no method of it")
        setattr(task, name, torch.compile(method))
