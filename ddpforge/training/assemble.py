"""Puts what a recipe names together: into a trainer, or into an evaluator of what was trained."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from torch.optim import SGD, Optimizer

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.errors import UsageError
from ddpforge.exchange.initial import load_initial
from ddpforge.interfaces import Callback, Contract, Replica, Tracker, World
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.blocks import find_blocks, rework_blocks
from ddpforge.training.contract import contract_of, prove
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.fitness import watch_batchnorm
from ddpforge.training.loop import Trainer
from ddpforge.training.optimizers import build_optimizer
from ddpforge.training.parameter_groups import parameter_groups
from ddpforge.training.parts import Parts
from ddpforge.training.restoring import restore_callbacks, restore_weights
from ddpforge.training.sums import SMALL
from ddpforge.training.turns import draws_of

__all__ = ["assemble", "evaluating"]

log = logging.getLogger("ddpforge")


def assemble(
    parts: Parts,
    world: World,
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    started: list[Callback],
    init_from: str | None = None,
) -> Trainer:
    """A trainer out of `parts`, which are built, in `world`, which their strategy has set up; nothing is restored yet.

    `init_from` is where initial weights come from, see `exchange.initial`. Callbacks that have started are added to
    `started`, also when a later one fails: they are to hear how it ended.

    Raises UsageError for parts that do not fit together, PluginError for a broken one.
    """
    recipe = parts.recipe
    if not parts.is_open:
        parts.open(world)

    model = _spread(parts)
    with _recipes_fault():
        watch_batchnorm(model, *parts.training.fewest(_batches(parts)))
        optimizer = build_optimizer(parts.registry, recipe.optimizer, model, list(parts.turns))
    replica = _prepared(parts, world, model, optimizer)
    if init_from:
        load_initial(init_from, replica, world.all, skip=recipe.checkpoint.init_skip)
        replica.weights.changed()
    _start(parts, world, replica, started)

    return Trainer(
        recipe=recipe,
        world=world,
        replica=replica,
        task=parts.task,
        optimizer=optimizer,
        compares=_may_compare(contract_of(parts.strategy), recipe.train, parts.size.all),
        schedule=parts.schedule,
        schedules=parts.schedules,
        plan=parts.plan,
        training=parts.training,
        evaluator=_evaluator(parts, world, replica),
        callbacks=parts.callbacks,
        checkpoints=checkpoints,
        tracker=tracker,
    )


@contextmanager
def evaluating(parts: Parts, world: World, checkpoint: Reader) -> Iterator[Evaluator]:
    """An evaluator out of `parts`, which are built, with the weights of `checkpoint` and its callbacks' state.

    A strategy prepares a model together with an optimizer: it gets SGD, which keeps nothing. Callbacks that have
    started hear how it ended. Raises what `assemble` raises, and CheckpointError where the checkpoint does not fit.
    """
    parts.open(world)
    started: list[Callback] = []
    try:
        model = _spread(parts)
        with _recipes_fault():
            groups = parameter_groups(model, ())
        replica = _prepared(parts, world, model, SGD(groups, lr=0.0))
        _start(parts, world, replica, started)
        restore_weights(replica, checkpoint)
        restore_callbacks(parts.recipe, parts.callbacks, checkpoint, world)
        yield _evaluator(parts, world, replica)
        replica.close()
    except BaseException as error:
        _end(started, error)
        raise
    _end(started, None)


# ---------------------------------------------------------------------------------------------- what both are made of
def _spread(parts: Parts) -> nn.Module:
    """The model as the strategy lays it over ranks.

    An optimizer is built afterwards: one of the parameters before would train nothing.
    """
    train = parts.recipe.train
    with _recipes_fault():
        blocks = find_blocks(parts.model, train.blocks)
        rework_blocks(blocks, train)
        bare = parts.model
        if train.sync_batchnorm:
            bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)  # type: ignore[no-untyped-call]
        return parts.strategy.wrap(bare, blocks)


def _batches(parts: Parts) -> int | None:
    """Counts the global batches of the run; None where that is not known."""
    total = parts.plan.horizon.total
    return total and total * draws_of(parts.turns)


def _prepared(parts: Parts, world: World, model: nn.Module, optimizer: Optimizer) -> Replica:
    """Has the strategy prepare both; proves that the replica is what the strategy promises."""
    strategy = parts.strategy
    replica = strategy.prepare(model, optimizer)
    prove(contract_of(strategy), type(strategy).__name__, world, replica.weights, parts.size)
    return replica


def _start(parts: Parts, world: World, replica: Replica, started: list[Callback]) -> None:
    for callback in parts.callbacks.values():
        callback.on_start(replica.bare, world, replica.weights)
        started.append(callback)


def _end(started: Sequence[Callback], error: BaseException | None) -> None:
    """Tells all of them, whatever one of them raises; a failure that came before is the one to hear of."""
    failures: list[Exception] = []
    for callback in started:
        try:
            callback.on_end(error)
        except Exception as failure:
            failures.append(failure)
    if error is None and failures:
        raise failures[0]
    for one in failures:
        log.warning("while the evaluation was ending: %s", one, exc_info=one)


def _evaluator(parts: Parts, world: World, replica: Replica) -> Evaluator:
    return Evaluator(
        world=world,
        replica=replica,
        task=parts.task,
        sets=parts.evaluation,
        callbacks=parts.callbacks,
        seed=parts.recipe.train.seed,
    )


def _may_compare(contract: Contract, train: TrainSection, parameters: int) -> bool:
    """True if the first loss can be compared with that of its halves, in a copy of the model, in a moment."""
    return "weights" not in contract.shards and train.compile == "off" and parameters <= SMALL


@contextmanager
def _recipes_fault() -> Iterator[None]:
    """A ValueError in here says that parts of the recipe do not fit together."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
