"""Builds everything that a recipe names and puts it together into a trainer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ddpforge.blocks import find_blocks, rework_blocks
from ddpforge.checkpoint.initial import load_initial
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.contract import count_parameters, prove
from ddpforge.data import Batches, Share, mix, open_data
from ddpforge.durations import Horizon
from ddpforge.errors import UsageError
from ddpforge.interfaces import Callback, Strategy, Task, Tracker, World
from ddpforge.kinds import build
from ddpforge.optim.groups import parameter_groups
from ddpforge.pace import in_steps
from ddpforge.recipe import Recipe
from ddpforge.recipe.batch import plan_batch
from ddpforge.registry import Registry
from ddpforge.trainer import Trainer

__all__ = ["WEIGHTS", "assemble"]

WEIGHTS = 0x1217  # keeps the random numbers of initial weights apart from all others


def assemble(
    recipe: Recipe,
    registry: Registry,
    strategy: Strategy,
    world: World,
    checkpoints: Checkpoints,
    tracker: Tracker,
    *,
    started: list[Callback],
    init_from: str | None = None,
) -> Trainer:
    """A trainer for `recipe` in `world`, which `strategy` has set up; nothing is trained or restored yet.

    `init_from` is where initial weights come from, see `checkpoint.initial`. Callbacks that have started are added to
    `started`, also when a later one fails: they are to hear how it ended.

    Raises RecipeError or UsageError for a recipe whose parts do not fit together, PluginError for a broken part.
    """
    parts = (recipe.data.train, recipe.data.eval)
    sets = [build(registry, "data", part, seed=recipe.train.seed) for part in parts if part]
    training, evaluation = _batches(recipe, world, sets)
    horizon = _horizon(recipe, training)
    task: Task = build(registry, "task", recipe.task)

    # The same initial weights on every rank. The order matters: a strategy shards or replaces the model before an
    # optimizer is built from its parameters, for an optimizer of the old ones would train nothing.
    torch.manual_seed(mix(recipe.train.seed, WEIGHTS))
    with strategy.building():
        bare = build(registry, "model", recipe.model)
    size = count_parameters(bare)
    with _recipes_fault():
        for data in sets:
            task.check(bare, data)
        blocks = find_blocks(bare, recipe.train.blocks)
        rework_blocks(blocks, recipe.train)
        model = strategy.wrap(bare, blocks)
        groups = parameter_groups(model, recipe.optimizer.no_decay)
    optimizer = build(registry, "optimizer", recipe.optimizer, params=groups)
    model, optimizer = strategy.prepare(model, optimizer)
    weights = strategy.weights(model, optimizer)
    prove(strategy, world, weights, size)
    if init_from:
        load_initial(init_from, strategy, model, optimizer, skip=recipe.checkpoint.init_skip)
        weights.changed()

    callbacks: dict[str, Callback] = {
        name: build(registry, "callback", component) for name, component in recipe.callbacks.items()
    }
    for callback in callbacks.values():
        callback.on_start(strategy.unwrap(model), world, weights)
        started.append(callback)

    return Trainer(
        recipe=recipe,
        world=world,
        strategy=strategy,
        task=task,
        model=model,
        parameters=size.all,
        optimizer=optimizer,
        schedule=build(registry, "schedule", recipe.schedule, horizon=horizon),
        horizon=horizon,
        training=training,
        evaluation=evaluation,
        callbacks=callbacks,
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


def _horizon(recipe: Recipe, training: Batches) -> Horizon:
    length, per_epoch = recipe.train.length, training.steps_per_epoch
    total = None if length.is_time else in_steps("train.length", length, Horizon(None, per_epoch))
    return Horizon(total, per_epoch)


@contextmanager
def _recipes_fault() -> Iterator[None]:
    """A ValueError in here says that parts of the recipe do not fit together."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
