"""Puts what a recipe names together into a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.components.building import build
from ddpforge.errors import UsageError
from ddpforge.exchange.initial import load_initial
from ddpforge.interfaces import Callback, Contract, Tracker, World
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.blocks import find_blocks, rework_blocks
from ddpforge.training.contract import contract_of, prove
from ddpforge.training.fitness import watch_batchnorm
from ddpforge.training.loop import Trainer
from ddpforge.training.parameter_groups import parameter_groups
from ddpforge.training.parts import Parts
from ddpforge.training.sums import SMALL

__all__ = ["assemble"]


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

    `init_from` is where initial weights come from, see `checkpoint.initial`. Callbacks that have started are added to
    `started`, also when a later one fails: they are to hear how it ended.

    Raises UsageError for parts that do not fit together, PluginError for a broken one.
    """
    recipe, strategy = parts.recipe, parts.strategy
    if not parts.is_open:
        parts.open(world)

    # The order matters: a strategy shards or replaces the model before an optimizer is built from its parameters, for
    # an optimizer of the old ones would train nothing.
    with _recipes_fault():
        blocks = find_blocks(parts.model, recipe.train.blocks)
        rework_blocks(blocks, recipe.train)
        bare = parts.model
        if recipe.train.sync_batchnorm:
            bare = nn.SyncBatchNorm.convert_sync_batchnorm(bare)  # type: ignore[no-untyped-call]
        model = strategy.wrap(bare, blocks)
        watch_batchnorm(model, *parts.training.fewest(parts.horizon.total))
        groups = parameter_groups(model, recipe.optimizer.no_decay)
    optimizer = build(parts.registry, "optimizer", recipe.optimizer, params=groups)
    replica = strategy.prepare(model, optimizer)
    contract = contract_of(strategy)
    prove(contract, type(strategy).__name__, world, replica.weights, parts.size)
    if init_from:
        load_initial(init_from, replica, world.all, skip=recipe.checkpoint.init_skip)
        replica.weights.changed()

    for callback in parts.callbacks.values():
        callback.on_start(replica.bare, world, replica.weights)
        started.append(callback)

    return Trainer(
        recipe=recipe,
        world=world,
        replica=replica,
        task=parts.task,
        optimizer=optimizer,
        compares=_may_compare(contract, recipe.train, parts.size.all),
        schedule=parts.schedule,
        horizon=parts.horizon,
        training=parts.training,
        evaluation=parts.evaluation,
        callbacks=parts.callbacks,
        checkpoints=checkpoints,
        tracker=tracker,
    )


def _may_compare(contract: Contract, train: TrainSection, parameters: int) -> bool:
    """Whether the first loss can be compared with that of its halves, in a copy of the model, in a moment."""
    return "weights" not in contract.shards and train.compile == "off" and parameters <= SMALL


@contextmanager
def _recipes_fault() -> Iterator[None]:
    """A ValueError in here says that parts of the recipe do not fit together."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
