"""Assembles built components into a trainer, or into an evaluator of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Optimizer

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.schema import omits_weights
from ddpforge.errors import ForgeError, PluginError, UsageError, recipe_faults
from ddpforge.interfaces import Callback, CanonicalState, Replica, RunContext, SavedTensor, Task, Tracker, World
from ddpforge.ranks.process_exit import forbid_sys_exit
from ddpforge.ranks.run_limits import RunLimits
from ddpforge.ranks.signals import StopRequests
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.blocks import find_blocks
from ddpforge.training.cadence import Cadences
from ddpforge.training.callback_calls import CallbackCalls
from ddpforge.training.checkpoint_saver import CheckpointSaver
from ddpforge.training.checks import FirstStepCheck, check_first_step, check_together, compare_built
from ddpforge.training.consensus import Consensus, PeriodicCheck
from ddpforge.training.contract import contract_of, verify_contract
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.features import Assembled, Feature, features_of, merged, rework
from ddpforge.training.initial_weights import load_initial
from ddpforge.training.learning_rates import Rates, check_scheduled_values
from ddpforge.training.loop import Trainer
from ddpforge.training.media import MediaLogger
from ddpforge.training.milestones import Milestones
from ddpforge.training.optimizers import build_optimizer
from ddpforge.training.parameter_groups import local_groups, parameter_groups
from ddpforge.training.restoring import OF_TASK, restore_callbacks, restore_kept, restore_weights
from ddpforge.training.rows import RowBuilder
from ddpforge.training.stages import Built, Dealt
from ddpforge.training.stepping import Stepping

__all__ = ["assemble", "assemble_evaluator", "cleanup", "compile_losses", "connect"]

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
    saving: CheckpointSaver | None = None,
    limits: RunLimits | None = None,
) -> Trainer:
    """Returns a trainer for the built `parts`; no checkpoint is restored yet.

    Args:
        world: the ranks, as the strategy has set them up.
        folder: the run folder.
        life: calls `on_end` of each started callback when it closes, even if a later callback fails to start.
        init_from: the source of initial weights, see `initial_weights`.
        begins: False if a checkpoint will be restored: auxiliary modules then skip their initial weights.
        trained: True if the run has trained steps before. If not, the first step is checked.
        saving: replaces the saver of checkpoints, e.g. for a trial that saves nothing.
        limits: ends the run at a time, or if a file in its folder requests it; on rank 0.

    Raises UsageError for parts that do not fit together, PluginError for a broken part.
    """
    recipe = parts.recipe
    first_checks = [] if trained else check_first_step(parts, world)
    model = _spread(parts)
    with recipe_faults():
        updates, blocks = list(parts.updates), recipe.train.blocks
        optimizer = build_optimizer(parts.registry, recipe.optimizer, model, updates, blocks)
    check_scheduled_values(optimizer, parts.value_schedules, parts.plan.horizon.total)
    check_together("optimizer", parts, world, model, optimizer)
    replica = _prepared(parts, world, model, optimizer)
    if init_from:
        _initialise(replica, init_from, world, skip=recipe.checkpoint.init_ignore)
    run = Assembled(parts=parts, world=world, replica=replica, begins=begins, trains=True)
    features = features_of(run)
    callbacks = {**_callbacks_of(parts, features), **parts.callbacks}
    shows = MediaLogger(tracker, is_rank_zero=world.is_rank_zero)
    parts.task.log_media = shows  # type: ignore[method-assign]
    _start(run, callbacks, shows, folder, life)

    return connect(
        run,
        optimizer,
        callbacks,
        features,
        checkpoints,
        tracker,
        saving=saving,
        limits=limits,
        shows=shows,
        first_checks=first_checks,
    )


def connect(
    run: Assembled,
    optimizer: Optimizer,
    callbacks: Mapping[str, Callback],
    features: Sequence[Feature],
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    saving: CheckpointSaver | None = None,
    limits: RunLimits | None = None,
    shows: MediaLogger | None = None,
    first_checks: Sequence[FirstStepCheck] = (),
) -> Trainer:
    """Builds the parts of the loop for a run whose model, optimizer and callbacks are ready; returns its trainer.

    Call it before any state is restored: the recipe sets the learning rates, not a checkpoint.
    """
    parts, world, replica = run.parts, run.world, run.replica
    shows = shows or MediaLogger(tracker, is_rank_zero=world.is_rank_zero)
    evaluates = bool(parts.evaluation) and parts.recipe.train.eval_by == "run"
    cadences = Cadences(parts.recipe, parts.plan, evaluates=evaluates)
    consensus = Consensus(world.global_ranks, StopRequests(), cadences.keys, limits)
    calls = CallbackCalls(callbacks, replica, world.global_ranks)
    evaluator = _evaluator(parts, world, replica, features, callbacks, PeriodicCheck(consensus.poll))
    saving = saving or CheckpointSaver(checkpoints, parts.recipe.checkpoint, replica, calls, tracker, features)
    groups = parts.recipe.optimizer.groups.items()
    starts = {name: parts.plan.horizon.steps(group.start) for name, group in groups if group.start}
    rates = Rates(optimizer, parts.schedules, parts.value_schedules, starts)
    rows = RowBuilder(run, rates, tracker, features)
    stepping = Stepping(run, rates, calls, saving, shows, features, first_checks)
    milestones = Milestones(run, evaluator, saving, rows, calls, consensus, features)
    return Trainer(run, optimizer, stepping, milestones, rows, calls, consensus, cadences, shows, features)


@contextmanager
def assemble_evaluator(
    parts: Dealt, world: World, checkpoint: CheckpointReader, folder: Path, *, weights: str | None = None
) -> Iterator[Evaluator]:
    """Yields an evaluator of the built `parts` with the weights and the callbacks' state of `checkpoint`.

    Args:
        folder: the run folder. Values that callbacks show are not stored.
        weights: the weights to evaluate in place of the callbacks' choice: "model", or the name of a callback that
            keeps weights.

    Calls `on_end` of each started callback. Raises the errors of `assemble`, and CheckpointError if the checkpoint does
    not fit.
    """
    compare_built(parts, world)
    with ExitStack() as life:
        model = _spread(parts)
        with recipe_faults():
            groups = local_groups(parameter_groups(model, ()))
        # A strategy prepares a model together with an optimizer: this SGD has no state.
        replica = _prepared(parts, world, model, SGD(groups, lr=0.0))
        run = Assembled(parts=parts, world=world, replica=replica, begins=False, trains=False)
        features = features_of(run)
        beside = _callbacks_of(parts, features)
        callbacks = {**beside, **parts.callbacks}
        _start(run, callbacks, MediaLogger(Tracker(), is_rank_zero=world.is_rank_zero), folder, life)
        if omits_weights(checkpoint.metadata.loop) and (source := parts.recipe.checkpoint.init_from):
            _initialise(replica, source, world, skip=parts.recipe.checkpoint.init_ignore)
        restore_weights(replica, checkpoint, features)
        restore_callbacks(parts.recipe, callbacks, checkpoint, world)
        if weights is not None:
            restore_kept(replica, checkpoint, weights)
        yield _evaluator(parts, world, replica, features, callbacks if weights is None else beside)
        replica.close()


# ---------------------------------------------------------------------------------------------- parts of both
def _callbacks_of(parts: Dealt, features: Sequence[Feature]) -> dict[str, Callback]:
    """Returns the callbacks of features and of the task, by name; they are called before those of the recipe."""
    found = merged([feature.callbacks() for feature in features], "callback")
    if taken := found.keys() & parts.callbacks.keys():
        name = min(taken)
        raise UsageError(
            f"the callback `{name}` has the name under which checkpoints hold a part of the task",
            hints=["give the callback another name"],
            key=f"callbacks.{name}",
        )
    return {**found, OF_TASK: parts.task.callback} if parts.task.callback else found


def _spread(parts: Built) -> nn.Module:
    """Changes the model as [train] sets it, and returns it as the strategy wraps it.

    Build the optimizer afterwards: the strategy may replace the model's parameters.
    """
    with recipe_faults():
        blocks = find_blocks(parts.model, parts.recipe.train.blocks)
        return parts.strategy.wrap(rework(parts, parts.model, blocks), blocks)


def _prepared(parts: Built, world: World, model: nn.Module, optimizer: Optimizer) -> Replica:
    """Returns the strategy's replica; raises StrategyError if it breaks the strategy's contract."""
    strategy = parts.strategy
    replica = strategy.prepare(model, optimizer)
    verify_contract(contract_of(strategy), type(strategy).__name__, world, replica.weights, parts.size)
    return replica


def _initialise(replica: Replica, source: str, world: World, *, skip: Sequence[str]) -> None:
    """Loads initial weights from `source` into the model."""
    state = replica.state()

    def take(saved: Mapping[str, SavedTensor]) -> None:
        replica.load_state(CanonicalState(saved, {}), partial=True)
        replica.weights.mark_changed()

    load_initial(source, state.model, state.aliases, take, world.global_ranks, skip=skip)


def _start(
    run: Assembled, callbacks: Mapping[str, Callback], shows: MediaLogger, folder: Path, life: ExitStack
) -> None:
    parts, replica = run.parts, run.replica
    context = RunContext(
        model=replica.unwrapped,
        world=run.world,
        weights=replica.weights,
        folder=folder,
        forward=replica.forward,
        log_media=shows,
        gradients=replica.gradients_by_name,
    )
    with replica.weights.whole_guard():
        parts.task.start(replica.unwrapped, run.world)
    compile_losses(parts.task, parts.recipe.train)
    for callback in callbacks.values():
        callback.on_start(context)
        life.push(cleanup(callback.on_end))


def cleanup(duty: Callable[[BaseException | None], None]) -> Callable[[object, BaseException | None, object], None]:
    """Wraps a cleanup callback for an ExitStack. If the run has failed already, errors of `duty` are only logged."""

    def end(_: object, error: BaseException | None, __: object) -> None:
        try:
            with forbid_sys_exit():
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
    features: Sequence[Feature],
    callbacks: Mapping[str, Callback],
    looks: PeriodicCheck | None = None,
) -> Evaluator:
    return Evaluator(
        world=world,
        replica=replica,
        task=parts.task,
        sets=parts.evaluation,
        callbacks=callbacks,
        seed=parts.recipe.train.seed,
        features=features,
        looks=looks,
    )


def compile_losses(task: Task, train: TrainSection) -> None:
    """Compiles the methods named in `task.compiles`, if the recipe compiles the model.

    Raises PluginError for a name that is not a method.
    """
    for name in task.compiles if train.compile != "off" else ():
        method = getattr(task, name, None)
        if not callable(method):
            raise PluginError(f"{type(task).__name__}.compiles names `{name}`, which is not a method of the task")
        # Never with CUDA graphs: those of the model keep its outputs only until its next call.
        setattr(task, name, torch.compile(method))
