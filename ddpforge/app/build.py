"""Builds the stages of a run from its recipe: data and model, then the batches of a rank.

Only this module and `choose` build components. An error goes into the caller's `Problems`. The build continues with
MISSING in place of the component, so that one pass finds all errors of a recipe.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from ddpforge.app.choose import choose
from ddpforge.app.class_names import numbered_alike, with_class_names
from ddpforge.components.errors import BuildFailed, where_raised
from ddpforge.components.registry import NamedComponent, Registry
from ddpforge.components.registry import build as build_component
from ddpforge.data import RankShare, end_of_epochs, is_stream, mix, seed_all
from ddpforge.data.batch_assignment import Divider, Even
from ddpforge.data.collating import BatchKeys
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import PeerFailed, UsageError, recipe_faults
from ddpforge.interfaces import (
    AuxiliaryModule,
    BatchSampler,
    EpochBatchSampler,
    Schedule,
    Shuffled,
    World,
    device_kind,
)
from ddpforge.ranks.failures import exit_code_of, phrase
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe import LoadedRecipe
from ddpforge.recipe.run_plan import RunPlan, no_sampler_of_streams, plan_batch
from ddpforge.recipe.schema import Component
from ddpforge.training.blocks import find_blocks
from ddpforge.training.checks import check, check_built, check_samples, compare_built
from ddpforge.training.contract import SMALL, count_parameters
from ddpforge.training.data_names import DataNames
from ddpforge.training.dense_memory import make_dense
from ddpforge.training.features import change_built, declared_modules, feature_classes, join_data, only_one
from ddpforge.training.loaders import check_data, open_data, served
from ddpforge.training.optimizers import shares
from ddpforge.training.parameter_groups import freeze
from ddpforge.training.problems import Problems
from ddpforge.training.stages import MISSING, Built, Chosen, Dealt, key_of, source_components
from ddpforge.training.updates import batches_per_step

__all__ = [
    "WEIGHTS",
    "build",
    "build_alike",
    "build_checked",
    "build_dataset",
    "build_without_ranks",
    "check_chosen",
    "check_cut",
    "deal",
    "describe_shares",
    "short_steps",
]

T = TypeVar("T")

log = logging.getLogger("ddpforge")

WEIGHTS = 0x1217  # mixed into the seed of the initial weights, so that no other RNG has this seed
_DATASETS = 0xDA7A  # the same for the constructors of datasets


# ---------------------------------------------------------------------------------------------- data and model
def build(
    chosen: Chosen,
    problems: Problems,
    *,
    meta: bool = False,
    with_model: bool = True,
    names: DataNames | None = None,
) -> Built:
    """Builds data, model and schedules, the same on every rank.

    `meta`: build a large model on the meta device if its constructor can. It then has shapes, but no values.
    `with_model`: False builds only the data, e.g. to look at it; the model is then MISSING.
    `names`: those of the training data, if this is not built.
    """
    recipe, registry = chosen.recipe, chosen.registry
    components = source_components(recipe) if chosen.trains else {}
    data: dict[str, Any] = {}

    def dataset(key: str, component: Component, class_names: Sequence[str]) -> None:
        with problems.at("data", *key.split(".")):
            data[key] = build_dataset(registry, with_class_names(registry, component, class_names), recipe.train.seed)

    for key, component in components.items():
        dataset(key, component, ())
    if components and "train" not in components:
        numbered_alike(data, lambda key, found: dataset(key, components[key], found))
        join_data(chosen, data, problems)
    if "train" in data:
        names = DataNames.of(data["train"])
    names = names or DataNames()
    for name, component in chosen.evaluations().items():
        dataset(key_of(name), component, names.classes)
    order, plan = (MISSING, MISSING) if chosen.trains else (None, MISSING)
    limit = None
    if "train" in data:
        order, plan, limit = _plan(chosen, data["train"], problems)
    for key in data.keys() - {"train"}:
        with problems.at("data", *key.split(".")):
            open_data(data[key], **_opened(chosen, 1))

    # The same initial weights on every rank.
    torch.manual_seed(mix(recipe.train.seed, WEIGHTS))
    model = size = MISSING
    auxiliary: Mapping[str, AuxiliaryModule] = MISSING
    if with_model:
        with problems.at("model"):
            candidate = _on_meta(chosen) if meta else _model(chosen)
            if _is_usable(candidate, problems, "model"):
                make_dense(candidate)
                with problems.at("train", "freeze"), recipe_faults():
                    freeze(candidate, recipe.train.freeze)
                with problems.at("train", "frozen_dtype"), recipe_faults():
                    change_built(candidate, recipe.train)
                model, size = candidate, count_parameters(candidate)
        with problems.at("task"):
            found = declared_modules(chosen.task, model)
            usable = [_is_usable(one.module, problems, "task") for one in found.values()]  # a list: report all faults
            if all(usable):
                for one in found.values():
                    make_dense(one.module)
                auxiliary = found
    return Built.of(
        chosen,
        data=data,
        sampler=order,
        plan=plan,
        schedules={} if plan is MISSING else _schedules(chosen, plan, model, problems),
        value_schedules={} if plan is MISSING else _value_schedules(chosen, plan, model, problems),
        model=model,
        size=size,
        auxiliary=auxiliary,
        limit=limit,
        names=names,
    )


def build_dataset(registry: Registry, component: NamedComponent, seed: int) -> Any:
    """Builds a dataset. Each one starts with the same random numbers, so that random splits of the same data agree.

    The random numbers of the caller stay unchanged.
    """
    with isolated_rng():
        seed_all(mix(seed, _DATASETS))
        return build_component(registry, "data", component, seed=seed)


def _is_usable(model: nn.Module, problems: Problems, key: str) -> bool:
    """True if a bare model passes its checks. Later checks are meaningless for a model that does not."""
    return check("model", model, problems, key=key)


def _model(chosen: Chosen) -> nn.Module:
    with nullcontext() if chosen.strategy is MISSING else chosen.strategy.init_context():
        model: nn.Module = build_component(chosen.registry, "model", chosen.recipe.model)
    return model


def _on_meta(chosen: Chosen) -> nn.Module:
    """Builds the model on the meta device, or on the CPU if it is small or its constructor reads values."""
    with suppress(BuildFailed, NotImplementedError), torch.device("meta"):
        model: nn.Module = build_component(chosen.registry, "model", chosen.recipe.model)
        if count_parameters(model).all > SMALL:
            return model
    model = build_component(chosen.registry, "model", chosen.recipe.model)
    return model


def check_cut(chosen: Chosen, problems: Problems) -> None:
    """Checks that the strategy can split the model. Builds the model on the meta device, and no data."""
    with problems.at("model"):
        model = _on_meta(chosen)
        with problems.at("train", "blocks"), recipe_faults():
            found = find_blocks(model, chosen.recipe.train.blocks)
            with problems.at("strategy"):
                chosen.strategy.check(model, chosen.task, found)


# ---------------------------------------------------------------------------------------------- steps and schedules
def _plan(chosen: Chosen, data: Any, problems: Problems) -> tuple[BatchSampler | None, RunPlan, Divider | None]:
    """Builds the order of the training data, the plan of steps and cadences, and what divides steps by lengths."""
    order, plan, limit = MISSING, MISSING, None
    with problems.at("data", "train"):
        check_data(data)
        with problems.at("data", "sampler"):
            order = _sampler(chosen, data)
        if order is not MISSING:
            opened = _opened(chosen, chosen.recipe.train.global_batch)
            batches = open_data(data, order=order, **opened).steps_per_epoch
            # A step that draws several batches may reach into the next epoch: the epoch ends with that step.
            per_epoch = batches and math.ceil(batches / batches_per_step(chosen.updates))
            batch = plan_batch(chosen.recipe.train, 1) if chosen.batch is MISSING else chosen.batch
            ends = partial(_end_of_epochs, chosen, order)
            plan = RunPlan.of(chosen.recipe, batch, per_epoch, noting=problems.at, ends=ends) or MISSING
            limit = only_one(feature_classes(), "divider", chosen, data)
            if limit and order and plan is not MISSING:  # the forward passes of a rank in the first step
                share = RankShare(0, batch.data_ranks, batch.micro_batch, chosen.recipe.train.virtual_ranks)
                passes = len(share.divide(np.asarray(order(0)), limit))
                plan = replace(plan, batch=replace(plan.batch, accumulation=passes))
    return order, plan, limit


def _end_of_epochs(chosen: Chosen, order: BatchSampler | None, epochs: int) -> int | None:
    """Returns the last step of the first `epochs` epochs; None if all epochs have one length."""
    batches = end_of_epochs(order, epochs) if order else None
    return batches and math.ceil(batches / batches_per_step(chosen.updates))


def _schedules(chosen: Chosen, plan: RunPlan, model: nn.Module, problems: Problems) -> dict[str, Schedule]:
    recipe = chosen.recipe
    found: dict[str, Schedule] = {"": MISSING}
    with problems.at("schedule"):
        found[""] = _schedule(chosen, recipe.schedule, plan, model)
    for name, update in chosen.updates.items():
        with problems.at("optimizer", "updates", name, "schedule"):
            if update.schedule:
                found[name] = _schedule(chosen, update.schedule, plan, model)
    return found


def _value_schedules(chosen: Chosen, plan: RunPlan, model: nn.Module, problems: Problems) -> dict[str, Schedule]:
    """Builds the schedules of the optimizer's options other than the learning rate."""
    found: dict[str, Schedule] = {}
    for name, component in chosen.recipe.optimizer.schedules.items():
        with problems.at("optimizer", "schedules", name):
            found[name] = _schedule(chosen, component, plan, model, name)
    return found


def _schedule(chosen: Chosen, component: Component, plan: RunPlan, model: nn.Module, option: str = "lr") -> Schedule:
    """Builds the schedule of `option`; MISSING if it needs the model and there is none.

    Raises UsageError unless its first, middle and last factors are finite and not negative.
    """
    if model is MISSING and chosen.registry.takes("schedule", component, "model"):
        return MISSING
    given = {"horizon": plan.horizon, "model": model, "scheduled": option}
    schedule: Schedule = build_component(chosen.registry, "schedule", component, **given)
    last = max(0, (plan.horizon.total or 1) - 1)
    for step in sorted({0, last // 2, last}):
        try:
            factor = schedule(step)
        except Exception as error:
            message = f"schedule `{component.use}` fails at step {step}: {type(error).__name__}: {error}"
            raise UsageError(message, hints=where_raised(error)) from error
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise UsageError(
                f"schedule `{component.use}` returns {factor!r} for step {step}, not a number of 0 or more",
                hints=["a schedule returns the factor of the learning rate, e.g. 0.5"],
            )
    return schedule


def _sampler(chosen: Chosen, data: Any) -> BatchSampler | None:
    """Builds the recipe's order of the training data; by default shuffled. None for a stream."""
    train, component = chosen.recipe.train, chosen.recipe.data.sampler
    own: BatchSampler | None = only_one(feature_classes(), "order", chosen, data)
    if own:
        return own
    if is_stream(data):
        if component:
            raise no_sampler_of_streams(type(data))
        return None
    given = {
        "data": data,
        "seed": train.seed,
        "global_batch": train.global_batch,
        "drop_last": train.drop_last,
    }
    order: BatchSampler = (
        build_component(chosen.registry, "sampler", component, **given) if component else Shuffled(**given)
    )
    return order


def _opened(chosen: Chosen, batch: int) -> dict[str, Any]:
    keys = BatchKeys.of(chosen.recipe.data)
    fetching = {"seed": chosen.recipe.train.seed, "workers": 0, "prefetch": 2, "pin": False, "keys": keys}
    drop_last = chosen.recipe.train.drop_last
    return fetching | {"global_batch": batch, "share": RankShare(0, 1, batch), "drop_last": drop_last}


# ---------------------------------------------------------------------------------------------- one rank's batches
def deal(built: Built, world: World) -> Dealt:
    """Opens this rank's batches of the training data and of each evaluation set."""
    recipe, train, ranks = built.recipe, built.recipe.train, world.dp_ranks.size
    workers = recipe.data.workers
    fetching: dict[str, Any] = {
        "seed": train.seed,
        "workers": 0 if workers == "auto" else workers,
        "prefetch": recipe.data.prefetch,
        "keys": BatchKeys.of(recipe.data),
        "pin": device_kind(world.device).pins,
        # With several ranks, the watchdogs detect a rank without progress.
        "patience": train.hang_timeout.seconds if train.hang_timeout != "off" and world.global_ranks.size == 1 else 0.0,
    }
    training = MISSING
    if built.trains:
        training = open_data(
            built.data["train"],
            order=built.sampler,
            global_batch=built.plan.batch.global_batch,
            share=RankShare(world.dp_ranks.rank, ranks, built.plan.batch.micro_batch, train.virtual_ranks),
            drop_last=train.drop_last,
            limit=built.limit,
            **fetching,
        )
    batch = train.eval_batch or max(1, train.per_pass(ranks))
    if built.task.whole_batch:
        batch = math.ceil(train.global_batch / ranks)
    evaluation = {
        name: open_data(
            data := built.data[key_of(name)],
            order=Even(data, train.global_batch) if built.task.whole_batch and not is_stream(data) else None,
            global_batch=batch * ranks,
            share=RankShare(world.dp_ranks.rank, ranks, batch),
            drop_last=False,
            **fetching,
        )
        for name in built.evaluations()
    }
    if workers == "auto":
        if built.trains:
            training = served("train", built.data["train"], training, world.device, trains=True)
        for name, batches in evaluation.items():
            key = key_of(name)
            evaluation[name] = served(key, built.data[key], batches, world.device, trains=False)
    if built.trains and world.is_rank_zero and (note := short_steps(built)):
        log.warning("%s", note)
    return Dealt.of(built, training=training, evaluation=evaluation)


# ---------------------------------------------------------------------------------------------- with all checks
def check_chosen(chosen: Chosen, problems: Problems) -> None:
    """Raises every error that can be found before ranks join.

    If there is one, this builds data and model too, so that one pass reports all errors of the recipe.
    """
    check("chosen", chosen, problems)
    if problems:
        built = build(chosen, problems, meta=True)
        if check_built(built, problems):
            check_samples(built, problems)
    problems.raise_if_any()


def build_without_ranks(loaded: LoadedRecipe, registry: Registry, *, ranks: int, device: str | None = None) -> Built:
    """Builds a recipe for `ranks` ranks without joining them, a large model on the meta device. Raises every error."""
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=ranks, device=device)
    check("chosen", chosen, problems)
    built = build(chosen, problems, meta=True)
    check_built(built, problems)
    problems.raise_if_any()
    return built


def build_checked(
    chosen: Chosen, world: World, problems: Problems, *, samples: bool, names: DataNames | None = None
) -> Dealt:
    """Builds and checks data and model, and opens the batches of this rank. Raises every error.

    `samples`: also run the first samples through the model. A resumed run has done so before. `names`: see `build`.
    """
    built = build(chosen, problems, names=names)
    fits = check_built(built, problems)
    stage: Built = built if problems else deal(built, world)
    compared = samples and fits and check_samples(stage, problems)
    problems.raise_if_any()
    assert isinstance(stage, Dealt)
    return replace(stage, compares=not compared)


def build_alike(
    chosen: Chosen, world: World, peers: WriterGroup, problems: Problems, *, samples: bool
) -> tuple[Dealt, Mapping[str, Any]]:
    """Builds on every rank. Returns the result and fingerprints of the data; raises if ranks differ."""
    dealt = on_every_rank(peers, lambda: build_checked(chosen, world, problems, samples=samples))
    return dealt, compare_built(dealt, world)


def on_every_rank(peers: WriterGroup, action: Callable[[], T]) -> T:
    """Calls `action` on all ranks and returns this rank's result.

    If it fails on a rank, all ranks raise: that rank its own error, the others PeerFailed with its exit code.
    """
    mine: Exception | None = None
    try:
        result = action()
    except Exception as error:
        mine = error
    try:
        failures = peers.ranks.all_gather_object(None if mine is None else (phrase(mine), exit_code_of(mine)))
    except RuntimeError:
        failures = []
        if mine is None:
            raise  # `beginning` replaces this error with the failure of the other rank
    if mine is not None:
        raise mine
    for rank, failure in enumerate(failures):
        if failure is not None:
            raise PeerFailed(failure[1], f"rank {rank} failed first: {failure[0]}")
    return result


# ---------------------------------------------------------------------------------------------- in words
def short_steps(built: Built) -> str:
    """Returns a note if an epoch has fewer samples than `train.global_batch`, so that each step is smaller; else ""."""
    order, batch = built.sampler, built.recipe.train.global_batch
    if not isinstance(order, EpochBatchSampler) or order.places >= batch:
        return ""
    return f"every step has {order.places} samples, not train.global_batch = {batch}: an epoch has no more samples"


def describe_shares(built: Built) -> list[str]:
    """Describes which parameters each update or parameter group trains; empty if the recipe has neither."""
    if not (built.updates or built.recipe.optimizer.groups):
        return []
    return shares(built.recipe.optimizer, built.model, list(built.updates))
