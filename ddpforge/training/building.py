"""Builds the data, the model and the schedule, asks whether they fit together, and deals the data out to ranks."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ddpforge.builtin.orders.plain import Shuffled
from ddpforge.components.building import build
from ddpforge.data import RankShare, check_data, end_of_epochs, mix, open_data
from ddpforge.data.streams import is_stream
from ddpforge.errors import UsageError
from ddpforge.interfaces import EpochOrder, Order, World
from ddpforge.interop.initial import find_initial
from ddpforge.recipe.batch import plan_batch
from ddpforge.recipe.plan import Plan
from ddpforge.training.beside import OWNER, declared
from ddpforge.training.blocks import check_blocks, find_blocks
from ddpforge.training.contract import count_parameters
from ddpforge.training.fitness import check_model
from ddpforge.training.float8 import check_float8
from ddpforge.training.freezing import freeze
from ddpforge.training.loaders import served
from ddpforge.training.memory_format import make_dense
from ddpforge.training.optimizers import build_optimizer, check_parameters, shares
from ddpforge.training.parameter_groups import parameter_groups
from ddpforge.training.parts import Parts, key_of
from ddpforge.training.sums import SMALL
from ddpforge.training.task_state import NAME, has_state, refuse_parameters
from ddpforge.training.turns import draws_of
from ddpforge.training.whole_batch import Even, refusal_of_end, refusal_of_order

__all__ = [
    *("WEIGHTS", "build_data_and_model", "check_cut", "deal_out", "own_order", "plan_steps", "shares_of"),
    "short_steps",
]

log = logging.getLogger("ddpforge")

WEIGHTS = 0x1217  # keeps the random numbers of initial weights apart from all others


def build_data_and_model(parts: Parts, *, meta: bool = False) -> None:
    """Builds the data, the model and the schedule, and asks whether they fit together.

    With `meta` a large model has no memory, where it can be built so: nothing but its shapes is known then.
    """
    recipe, registry = parts.recipe, parts.registry
    components = {"train": recipe.data.train} if parts.trains else {}
    components |= {key_of(name): component for name, component in parts.evaluations().items()}
    parts.data = {}
    for key, component in components.items():
        with parts.noting("data", *key.split(".")):
            parts.data[key] = build(registry, "data", component, seed=recipe.train.seed)
    if "train" in parts.data:
        _count_steps(parts)
    for key in parts.data.keys() - {"train"}:
        with parts.noting("data", *key.split(".")):
            open_data(parts.data[key], **_opened(parts, 1))
    if parts.built.task is not None and parts.task.whole_batch and parts.built.strategy is not None:
        _check_ends(parts)

    # The same initial weights on every rank.
    torch.manual_seed(mix(recipe.train.seed, WEIGHTS))
    with parts.noting("model"):
        parts.built.model = _on_meta(parts) if meta else _model(parts)
        check_model(parts.model)
        make_dense(parts.model)
        with parts.noting("train", "freeze", faults=(ValueError,)):
            freeze(parts.model, recipe.train.freeze)
        parts.built.size = count_parameters(parts.model)
        _put_beside(parts)
        _fit(parts)
    if meta and parts.trains and parts.built.model is not None and not parts.found:
        _try_optimizer(parts)


def check_cut(parts: Parts) -> None:
    """Builds the model without memory, and asks whether the strategy can cut it; without data."""
    with parts.noting("model"):
        model = _on_meta(parts)
        with parts.noting("train", "blocks", faults=(ValueError,)):
            found = find_blocks(model, parts.recipe.train.blocks)
            with parts.noting("strategy"):
                parts.strategy.check(model, parts.task, found)


def _try_optimizer(parts: Parts) -> None:
    """Builds the optimizer over the model's own parameters, which it may refuse; not over those without memory."""
    recipe = parts.recipe
    with parts.noting("optimizer", faults=(ValueError,)):
        if not any(parameter.is_meta for parameter in parts.model.parameters()):
            build_optimizer(parts.registry, recipe.optimizer, parts.model, list(parts.turns), recipe.train.blocks)


def _model(parts: Parts) -> nn.Module:
    with parts.strategy.building() if parts.built.strategy is not None else nullcontext():
        model: nn.Module = build(parts.registry, "model", parts.recipe.model)
    return model


def _put_beside(parts: Parts) -> None:
    """Asks the task for the modules beside the model, and whether they will do."""
    parts.beside = {}
    with parts.noting("task"):
        if parts.built.task is None:
            return
        parts.beside = declared(parts.task, parts.model)
        if parts.trains:
            refuse_parameters(parts.task, parts.model, parts.beside.values())
        if has_state(parts.task) and NAME in parts.recipe.callbacks:
            raise UsageError(
                f"callbacks.{NAME} has the name under which the task's state is saved", hints=["rename it"]
            )
        for name, beside in parts.beside.items():
            check_model(beside.module)
            make_dense(beside.module)
            if f"{OWNER}{name}" in parts.recipe.callbacks:
                raise UsageError(f"callbacks.{OWNER}{name} has the name of a module of the task", hints=["rename it"])
            if beside.weights is not None and not beside.is_saved:
                find_initial(beside.weights, f"weights of {name}")


def shares_of(parts: Parts) -> list[str]:
    """Says how turns or groups share the model's parameters."""
    if not (parts.turns or parts.recipe.optimizer.groups):
        return []
    found: list[str] = []
    with parts.noting("optimizer", faults=(ValueError,)):
        found = shares(parts.recipe.optimizer, parts.model, list(parts.turns))
    return found


def _on_meta(parts: Parts) -> nn.Module:
    """The model on the meta device; a small one, and one whose constructor looks at values, with its weights."""
    with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
        model: nn.Module = build(parts.registry, "model", parts.recipe.model)
        if count_parameters(model).all > SMALL:
            return model
    model = build(parts.registry, "model", parts.recipe.model)
    return model


def _fit(parts: Parts) -> None:
    """Asks whether the model suits the data and the keys of the recipe that speak of it."""
    recipe = parts.recipe
    with parts.noting("task", faults=(ValueError,)):
        for data in parts.data.values() if parts.built.task is not None else ():
            parts.task.check(parts.model, data)
        parts.fits = parts.built.task is not None and bool(parts.data)
    with parts.noting("strategy"):
        for data in parts.data.values() if parts.fits and parts.built.strategy is not None else ():
            parts.strategy.check_data(data)
    with parts.noting("train", "blocks", faults=(ValueError,)):
        found = find_blocks(parts.model, recipe.train.blocks)
        check_blocks(found, recipe.train)
        with parts.noting("train", "fp8", faults=(ValueError,)):
            check_float8(parts.model, found, recipe.train)
        with parts.noting("strategy"):
            if parts.built.strategy is not None and parts.built.task is not None:
                parts.strategy.check(parts.model, parts.task, found)
    with parts.noting("optimizer", faults=(ValueError,)):
        if parts.trains:
            turns, blocks = list(parts.turns), recipe.train.blocks
            check_parameters(parts.registry, recipe.optimizer, parts.model, turns, blocks)
        else:
            parameter_groups(parts.model, ())


def _count_steps(parts: Parts) -> None:
    """Plans the run in steps, with all that happens every so often, once the length of the data is known."""
    train = parts.recipe.train
    with parts.noting("data", "train"):
        check_data(parts.data["train"])
        is_known = False
        with parts.noting("data", "order"):
            parts.order, is_known = _order(parts), True
        if not is_known:
            return
        opened = _opened(parts, train.global_batch)
        batches = open_data(parts.data["train"], order=parts.order, **opened).steps_per_epoch
        # A step that draws several batches may reach into the next epoch: an epoch is what has all of its samples.
        per_epoch = batches and math.ceil(batches / draws_of(parts.turns))
        plan_steps(parts, per_epoch)


def plan_steps(parts: Parts, per_epoch: int | None) -> None:
    """Plans the run for data of so many steps per epoch, if it has a length, and builds the schedules."""
    recipe = parts.recipe
    batch, ends = parts.built.batch or plan_batch(recipe.train, 1), partial(_end_of_epochs, parts)
    parts.built.plan = Plan.of(recipe, batch, per_epoch, noting=parts.noting, ends=ends)
    if parts.built.plan:
        with parts.noting("schedule"):
            parts.built.schedule = build(parts.registry, "schedule", recipe.schedule, horizon=parts.plan.horizon)
        parts.schedules = {}
        for name, turn in parts.turns.items():
            with parts.noting("optimizer", "turns", name, "schedule"):
                if turn.schedule:
                    own = build(parts.registry, "schedule", turn.schedule, horizon=parts.plan.horizon)
                    parts.schedules[name] = own


def _end_of_epochs(parts: Parts, epochs: int) -> int | None:
    """The step that so many epochs end with, where the order has epochs of different lengths."""
    batches = end_of_epochs(parts.order, epochs) if parts.order else None
    return batches and math.ceil(batches / draws_of(parts.turns))


def _order(parts: Parts) -> Order | None:
    """The order of the training data: as the recipe says, or shuffled."""
    data, train, chosen = parts.data["train"], parts.recipe.train, parts.recipe.data.order
    if is_stream(data):
        if chosen:
            raise own_order(type(data))
        return None
    given = {
        "data": data,
        "seed": train.seed,
        "global_batch": train.global_batch,
        "drop_last": train.last_batch == "drop",
    }
    order: Order = build(parts.registry, "order", chosen, **given) if chosen else Shuffled(**given)
    return order


def own_order(stream: type) -> UsageError:
    """The error of an order for data that is a stream."""
    return UsageError(
        f"{stream.__name__} is an iterable dataset, whose samples come in its own order",
        hints=["leave [data.order] out, or give a dataset with __len__ and __getitem__"],
    )


def _check_ends(parts: Parts) -> None:
    """Asks whether the smallest batch of every dataset leaves a sample for every rank."""
    smallest = {
        f"data.{key}": Even(data, parts.recipe.train.global_batch).smallest
        for key, data in parts.data.items()
        if key != "train" and hasattr(data, "__len__")
    }
    if parts.built.plan is not None and isinstance(parts.order, EpochOrder):
        total, last = parts.plan.horizon.total, parts.order.steps_per_epoch - 1
        if total is None or total * draws_of(parts.turns) > last:
            smallest["data.train"] = parts.order.size(last)
    elif parts.built.plan is not None and parts.order:
        batch, total = parts.recipe.train.global_batch, parts.plan.horizon.total
        steps = total and total * draws_of(parts.turns)
        if refusal := refusal_of_order(parts.task, parts.order, batch, parts.data_ranks, steps):
            parts.note(("data", "order"), UsageError(refusal.message, hints=refusal.hints))
    for key, samples in smallest.items():
        if refusal := refusal_of_end(parts.task, key, samples, parts.data_ranks):
            parts.note(tuple(key.split(".")), UsageError(refusal.message, hints=refusal.hints))


def _opened(parts: Parts, batch: int) -> dict[str, Any]:
    fetching = {"seed": parts.recipe.train.seed, "workers": 0, "prefetch": 2, "pin": False}
    drop_last = parts.recipe.train.last_batch == "drop"
    return fetching | {"global_batch": batch, "share": RankShare(0, 1, batch), "drop_last": drop_last}


def deal_out(parts: Parts, world: World) -> None:
    """Deals the data out: this rank's part of the training data, and of each evaluation set."""
    recipe, train, ranks = parts.recipe, parts.recipe.train, world.data.size
    workers = recipe.data.workers
    fetching: dict[str, Any] = {
        "seed": train.seed,
        "workers": 0 if workers == "auto" else workers,
        "prefetch": recipe.data.prefetch,
        "pin": world.device.type == "cuda",
        # Of several ranks, those beside them see one stand still.
        "patience": train.stall.seconds if train.stall != "off" and world.all.size == 1 else 0.0,
    }
    if parts.trains:
        parts.built.training = open_data(
            parts.data["train"],
            order=parts.order,
            global_batch=parts.plan.batch.global_batch,
            share=RankShare(world.data.rank, ranks, parts.plan.batch.micro_batch, train.elastic_shards),
            drop_last=train.last_batch == "drop",
            **fetching,
        )
    batch = train.eval_batch or max(1, train.per_pass(ranks))
    if parts.task.whole_batch:
        batch = math.ceil(train.global_batch / ranks)
    parts.evaluation = {
        name: open_data(
            parts.data[key_of(name)],
            order=_order_of_evaluation(parts, parts.data[key_of(name)]),
            global_batch=batch * ranks,
            share=RankShare(world.data.rank, ranks, batch),
            drop_last=False,
            **fetching,
        )
        for name in parts.evaluations()
    }
    if workers == "auto":
        _serve(parts, world.device)
    if parts.trains and world.is_main and (note := short_steps(parts)):
        log.warning("%s", note)
    parts.is_open = True


def short_steps(parts: Parts) -> str:
    """Describes steps that are all smaller than the recipe asks for, as the data has fewer samples; empty otherwise."""
    order, batch = parts.order, parts.recipe.train.global_batch
    if not isinstance(order, EpochOrder) or order.places >= batch:
        return ""
    return f"every step has {order.places} samples, not train.global_batch = {batch}: an epoch has no more"


def _serve(parts: Parts, device: torch.device) -> None:
    """Gives the batches loader processes where that is worth it."""
    if parts.trains:
        parts.built.training = served("train", parts.data["train"], parts.training, device, trains=True)
    for name, batches in parts.evaluation.items():
        key = key_of(name)
        parts.evaluation[name] = served(key, parts.data[key], batches, device, trains=False)


def _order_of_evaluation(parts: Parts, data: Any) -> Order | None:
    whole = parts.task.whole_batch and not is_stream(data)
    return Even(data, parts.recipe.train.global_batch) if whole else None
