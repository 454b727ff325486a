"""Puts what a recipe names together into a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ddpforge.blocks import find_blocks, rework_blocks
from ddpforge.checkpoint.initial import load_initial
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.contract import prove
from ddpforge.data import Batches, Share, open_data
from ddpforge.errors import UsageError
from ddpforge.fitness import watch_batchnorm
from ddpforge.interfaces import Callback, Tracker, World
from ddpforge.kinds import build
from ddpforge.optim.groups import parameter_groups
from ddpforge.parts import Parts
from ddpforge.recipe import Recipe
from ddpforge.recipe.batch import plan_batch
from ddpforge.trainer import Trainer

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
    training, evaluation = _batches(recipe, world, parts.sets)

    # The order matters: a strategy shards or replaces the model before an optimizer is built from its parameters, for
    # an optimizer of the old ones would train nothing.
    with _recipes_fault():
        blocks = find_blocks(parts.model, recipe.train.blocks)
        rework_blocks(blocks, recipe.train)
        model = strategy.wrap(parts.model, blocks)
        watch_batchnorm(model, *training.fewest(parts.horizon.total))
        groups = parameter_groups(model, recipe.optimizer.no_decay)
    optimizer = build(parts.registry, "optimizer", recipe.optimizer, params=groups)
    model, optimizer = strategy.prepare(model, optimizer)
    weights = strategy.weights(model, optimizer)
    prove(strategy, world, weights, parts.size)
    if init_from:
        load_initial(init_from, strategy, model, optimizer, skip=recipe.checkpoint.init_skip)
        weights.changed()

    for callback in parts.callbacks.values():
        callback.on_start(strategy.unwrap(model), world, weights)
        started.append(callback)

    return Trainer(
        recipe=recipe,
        world=world,
        strategy=strategy,
        task=parts.task,
        model=model,
        parameters=parts.size.all,
        optimizer=optimizer,
        schedule=parts.schedule,
        horizon=parts.horizon,
        training=training,
        evaluation=evaluation,
        callbacks=parts.callbacks,
        checkpoints=checkpoints,
        tracker=tracker,
    )


def _batches(recipe: Recipe, world: World, sets: list[Any]) -> tuple[Batches, Batches | None]:
    """This rank's part of the training data and, where there is any, of the evaluation data."""
    train = recipe.train
    plan = plan_batch(train, world.data_size)
    fetching: dict[str, Any] = {
        "seed": train.seed,
        "workers": recipe.data.workers,
        "prefetch": recipe.data.prefetch,
        "pin": world.device.type == "cuda",
    }
    training = open_data(
        sets[0],
        global_batch=plan.global_batch,
        share=Share(world.data_rank, world.data_size, plan.micro_batch, train.elastic_shards),
        shuffle=True,
        drop_last=train.last_batch == "drop",
        **fetching,
    )
    if len(sets) == 1:
        return training, None

    batch = train.eval_batch or plan.micro_batch
    evaluation = open_data(
        sets[1],
        global_batch=batch * world.data_size,
        share=Share(world.data_rank, world.data_size, batch),
        shuffle=False,
        drop_last=False,
        **fetching,
    )
    return training, evaluation


@contextmanager
def _recipes_fault() -> Iterator[None]:
    """A ValueError in here says that parts of the recipe do not fit together."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
