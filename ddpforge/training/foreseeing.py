"""Builds what costs little, before ranks join, and asks what can be known without data and model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ddpforge.components.building import build
from ddpforge.components.options import Nested
from ddpforge.components.stand_ins import NeedsLibraries, without_libraries
from ddpforge.data import mix
from ddpforge.data.streams import are_streams
from ddpforge.errors import ForgeError, PluginError, UsageError
from ddpforge.interfaces import Metric, Refusal
from ddpforge.interop.initial import find_initial
from ddpforge.ranks.devices import device_type
from ddpforge.recipe.load import check_world
from ddpforge.recipe.report import did_you_mean
from ddpforge.recipe.schema import Component
from ddpforge.runs.folder import RunFolder
from ddpforge.training.building import own_order, plan_steps
from ddpforge.training.callbacks import check_callback
from ddpforge.training.contract import contract_of
from ddpforge.training.first_look import name_of
from ddpforge.training.judging import settled, unsettled
from ddpforge.training.one_turn import takes_turn, turns_of
from ddpforge.training.optimizer_trial import check_optimizer
from ddpforge.training.parts import Parts
from ddpforge.training.refusals import (
    general_refusals,
    refusals_of_float8,
    refusals_of_optimizers,
    refusals_of_score,
)
from ddpforge.training.whole_batch import refusals_of_parts

__all__ = ["TEACHERS", "foresee"]

TEACHERS = 0x7EAC  # keeps the random numbers of models that a task holds apart from all others


def foresee(parts: Parts, *, ranks: int, device: str | None = None, folder: RunFolder | None = None) -> None:
    """Builds all but data, model and schedule, and asks what can be known on `ranks` ranks without those.

    `device` is "cpu" or "cuda"; by default what this machine has. Initial weights do not matter where `folder`
    holds checkpoints to resume from.
    """
    recipe = parts.recipe
    if parts.trains:
        with parts.noting("optimizer"):
            check_optimizer(parts.loaded, parts.registry)
    else:
        _choose_sets(parts)
    with parts.noting("strategy"):
        parts.built.strategy = build(parts.registry, "strategy", recipe.strategy)
        contract_of(parts.strategy)
        if not parts.trains:
            parts.built.strategy, parts.other_layout = parts.strategy.evaluating(ranks)
    with parts.noting("task"):
        torch.manual_seed(mix(recipe.train.seed, TEACHERS))  # it may hold models
        parts.built.task = build(parts.registry, "task", recipe.task)
        _check_turns(parts)
        _ask_metrics(parts)
    recipe = parts.recipe
    parts.callbacks = _named(parts, "callbacks", "callback", recipe.callbacks)
    _check_callbacks(parts)
    if parts.trains:
        parts.trackers = _named(parts, "track", "tracker", recipe.track.trackers)
    if parts.built.strategy is not None:
        _ask_strategy(parts, ranks, device)
    elif recipe.strategy.use in parts.not_imported:
        with parts.noting("train", "global_batch"):
            parts.built.batch = check_world(parts.loaded, ranks)
    if parts.trains:
        with parts.noting("data", "train"):
            _foresee_stream(parts)
    if parts.trains and recipe.checkpoint.init_from and not (folder and any(folder.checkpoints.glob("step-*"))):
        with parts.noting("checkpoint", "init_from"):
            find_initial(recipe.checkpoint.init_from)


def _check_turns(parts: Parts) -> None:
    """The task's turns must be those of the recipe."""
    turns, given = turns_of(parts.task), parts.recipe.optimizer.turns
    if turns and not takes_turn(parts.task):
        raise PluginError(
            f"{name_of(parts.task)} has the turns {', '.join(turns)}, and its `loss` is not told which it computes",
            hints=['def loss(self, model, batch, turn: str = "")'],
        )
    there = [f"it has {', '.join(turns)}"] if turns else ["it makes one update a step: take [optimizer.turns] out"]
    for name in given.keys() - set(turns):
        error = UsageError(
            f"the task `{parts.recipe.task.use}` has no turn `{name}`", hints=[*did_you_mean(name, turns), *there]
        )
        parts.note(("optimizer", "turns", name), error)
    for name in [turn for turn in turns if turn not in given and parts.trains]:
        error = UsageError(
            f"[optimizer.turns.{name}] is missing: the task makes an update of that name in every step",
            hints=[f"add it; where it is empty, it is as [optimizer] and trains `{name}.*`"],
        )
        parts.note(("optimizer",), error)

    parts.turns = {turn: given[turn] for turn in turns} if given.keys() == set(turns) else {}


def _named(parts: Parts, table: str, kind: str, components: Any) -> dict[str, Any]:
    found = {}
    for name, component in components.items():
        with parts.noting(table, name):
            found[name] = build(parts.registry, kind, component)
    return found


def _check_callbacks(parts: Parts) -> None:
    contract = getattr(parts.built.strategy, "contract", None)
    for name, callback in parts.callbacks.items():
        with parts.noting("callbacks", name):
            check_callback(name, callback, contract, ('"single"', '"ddp"', '"fsdp"'), trains=parts.trains)
        metric = getattr(callback, "metric", "")
        if parts.trains and not parts.recipe.data.evaluations and str(metric).startswith("eval/"):
            error = UsageError(f"nothing is evaluated, so nothing reports {metric}", hints=["add a [data.eval]"])
            parts.note(("callbacks", name, "metric"), error)


def _ask_metrics(parts: Parts) -> None:
    """Asks the task who finishes the metrics that the recipe names, and these which direction is better."""
    for chosen in _metrics(parts.recipe.task):
        metric = build(parts.registry, "metric", chosen)
        if type(metric).finish is not Metric.finish and metric.name not in parts.task.reports:
            raise PluginError(
                f"task `{parts.recipe.task.use}` does not say who finishes {metric.name}, which is no mean",
                hints=["in its constructor: self.reports = {metric.name: metric for metric in metrics}"],
            )
    parts.loaded = settled(parts.loaded, parts.task.reports)
    if parts.trains and (metric := unsettled(parts.loaded)):
        error = UsageError(
            f'cannot tell whether less or more of "{metric}" is better',
            hints=['add mode = "min" or mode = "max" to `checkpoint.keep`'],
        )
        parts.note(("checkpoint", "keep", "by"), error)


def _ask_strategy(parts: Parts, ranks: int, device: str | None) -> None:
    parts.data_ranks = parts.strategy.data_ranks(ranks)
    with parts.noting("strategy"):
        for refusal in _refusals(parts, ranks, device):
            parts.note(tuple(refusal.key.split(".")), UsageError(refusal.message, hints=refusal.hints))
    if parts.trains:
        with parts.noting("train", "global_batch"):
            parts.built.batch = check_world(parts.loaded, parts.strategy.data_ranks(ranks))


def _refusals(parts: Parts, ranks: int, device: str | None) -> list[Refusal]:
    """Finds what of the recipe cannot be done. Torch, which knows if there is a GPU, is asked where that matters."""
    train, strategy = parts.recipe.train, parts.strategy

    def on(where: str) -> list[Refusal]:
        general = general_refusals(train, strategy.data_ranks(ranks), where)
        turns = refusals_of_optimizers(parts.recipe, contract_of(strategy), where) if parts.trains else ()
        float8 = refusals_of_float8(parts.recipe, contract_of(strategy), where)
        of_task: list[Refusal] = []
        if parts.built.task is not None:
            of_task += refusals_of_parts(parts.task, train, parts.data_ranks)
            of_task += refusals_of_score(parts.recipe, parts.task, contract_of(strategy))
        return [*general, *float8, *turns, *of_task, *strategy.refusals(train, ranks, where)]

    if not without_libraries() or device or train.device != "auto":
        return on(device or device_type(train))
    with suppress(ForgeError):
        if (refused := on("cpu")) == on("cuda"):
            return refused
    raise NeedsLibraries


def _foresee_stream(parts: Parts) -> None:
    """Notes what cannot work with training data whose class says that it is a stream: an order, and to count epochs."""
    train = parts.recipe.data.train
    kind = parts.registry.load("data", train.use, train.base)
    if not isinstance(kind, type) or not are_streams(kind):
        return
    if parts.recipe.data.order:
        parts.note(("data", "order"), own_order(kind))
    if not hasattr(kind, "__len__"):
        plan_steps(parts, None)


def _choose_sets(parts: Parts) -> None:
    """Raises UsageError unless there is something to evaluate on: every set that is asked for."""
    known = [name for name in parts.recipe.data.evaluations if name]
    if not parts.recipe.data.evaluations:
        raise UsageError("the recipe has no [data.eval] to evaluate on")
    for name in parts.only:
        if name not in known:
            there = [f"there are {', '.join(known)}"] if known else ["its one [data.eval] has no name"]
            raise UsageError(
                f"the recipe has no [data.eval.{name}] to evaluate on", hints=[*did_you_mean(name, known), *there]
            )


def _metrics(task: Component) -> Iterator[Nested]:
    """Yields the metrics that a recipe names for its task."""
    for value in task.options.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Nested) and one.kind == "metric":
                yield one
