"""Builds what a recipe names, and finds in one pass what cannot work: before ranks train and a folder is made."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from traceback import walk_tb
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ddpforge.builtin.orders.plain import Shuffled
from ddpforge.components.building import build
from ddpforge.components.local_code import PREFIX
from ddpforge.components.options import Nested
from ddpforge.components.registry import NotImported, Registry, where_raised
from ddpforge.data import Batches, RankShare, check_data, end_of_epochs, mix, open_data
from ddpforge.data.nests import size, take
from ddpforge.data.randomness import own_random_numbers
from ddpforge.data.streams import is_stream
from ddpforge.errors import (
    EnvironmentProblem,
    ExitCode,
    ForgeError,
    Place,
    PluginError,
    Problem,
    RecipeError,
    UsageError,
)
from ddpforge.exchange.initial import find_initial
from ddpforge.interfaces import Beside, Callback, EpochOrder, Metric, Order, Schedule, Strategy, Task, Tracker, World
from ddpforge.plan import Plan
from ddpforge.ranks.devices import device_type
from ddpforge.recipe import LoadedRecipe, Recipe
from ddpforge.recipe.batch import BatchPlan, plan_batch
from ddpforge.recipe.layers import kind_at
from ddpforge.recipe.load import check_world
from ddpforge.recipe.origins import KeyPath
from ddpforge.recipe.report import did_you_mean
from ddpforge.recipe.schema import Component, TurnComponent
from ddpforge.runs.folder import RunFolder
from ddpforge.training.beside import OWNER, declared
from ddpforge.training.blocks import check_blocks, find_blocks
from ddpforge.training.callbacks import check_callback, overriding
from ddpforge.training.contract import Size, contract_of, count_parameters
from ddpforge.training.evaluation import prefix
from ddpforge.training.first_look import name_of
from ddpforge.training.fitness import check_model
from ddpforge.training.freezing import freeze
from ddpforge.training.judging import settled, unsettled
from ddpforge.training.one_turn import takes_turn, turns_of
from ddpforge.training.optimizer_trial import check_optimizer
from ddpforge.training.optimizers import check_parameters, shares
from ddpforge.training.parameter_groups import parameter_groups
from ddpforge.training.refusals import general_refusals, refusals_of_optimizers
from ddpforge.training.rehearsal import FEW, Rehearsal, first_batch, rehearse, try_before_model
from ddpforge.training.sums import SMALL
from ddpforge.training.turns import draws_of
from ddpforge.training.whole_batch import Even, refusal_of_end, refusal_of_order, refusals_of_parts

__all__ = ["WEIGHTS", "Parts", "key_of"]

log = logging.getLogger("ddpforge")

_OURS = "ddpforge.builtin.tasks."

WEIGHTS = 0x1217  # keeps the random numbers of initial weights apart from all others
_TEACHERS = 0x7EAC  # and those of models that a task holds


class Parts:
    """The parts that a recipe names, as far as they are built: first what costs little, then data and model.

    What cannot work is noted, and the building goes on with what it does not concern; `report` then raises all of it.
    Where nothing `trains`, there are neither training data, optimizer and schedule, nor trackers; evaluation sets are
    those that `only` names, or all.
    """

    strategy: Strategy
    task: Task
    callbacks: dict[str, Callback]
    trackers: dict[str, Tracker]
    batch: BatchPlan
    plan: Plan
    data: dict[str, Any]  # by the recipe's key below `data`: "train", "eval", "eval.NAME"
    order: Order | None  # of the training data; None for a stream, which has its own
    model: nn.Module
    size: Size
    beside: dict[str, Beside]  # what the task uses beside the model
    schedule: Schedule
    schedules: Mapping[str, Schedule]  # of turns that have one of their own
    turns: Mapping[str, TurnComponent] = MappingProxyType({})  # in the order of the task

    training: Batches
    evaluation: dict[str, Batches]  # by the set's name
    _fits = False  # whether the task takes model and data

    def __init__(
        self, loaded: LoadedRecipe, registry: Registry, *, trains: bool = True, only: Sequence[str] = ()
    ) -> None:
        self.loaded, self.registry = loaded, registry
        self.recipe: Recipe = loaded.recipe
        self.trains, self._only = trains, only
        self._problems: list[Problem] = []
        self._errors: list[ForgeError] = []
        self.not_imported = [  # code that the registry does not import; nothing is known of it
            component.use
            for path, component in self.recipe.components().items()
            if not registry.imports(str(kind_at(path, loaded.tables)), component.use)
        ]

    # ---------------------------------------------------------------------------------------- before ranks join
    def foresee(self, *, ranks: int, device: str | None = None, folder: RunFolder | None = None) -> None:
        """Builds all but data, model and schedule, and asks what can be known on `ranks` ranks without those.

        `device` is "cpu" or "cuda"; by default what this machine has. Initial weights do not matter where `folder`
        holds checkpoints to resume from.
        """
        recipe = self.recipe
        if self.trains:
            with self.noting("optimizer"):
                check_optimizer(self.loaded, self.registry)
        else:
            self._choose_sets()
        with self.noting("strategy"):
            self.strategy = build(self.registry, "strategy", recipe.strategy)
            contract_of(self.strategy)
        with self.noting("task"):
            torch.manual_seed(mix(recipe.train.seed, _TEACHERS))  # it may hold models
            self.task = build(self.registry, "task", recipe.task)
            self._check_turns()
            self._ask_metrics()
        recipe = self.recipe
        self.callbacks = self._named("callbacks", "callback", recipe.callbacks)
        self._check_callbacks()
        if self.trains:
            self.trackers = self._named("track", "tracker", recipe.track.trackers)
        if hasattr(self, "strategy"):
            self._ask_strategy(ranks, device)
        elif recipe.strategy.use in self.not_imported:
            with self.noting("train", "global_batch"):
                self.batch = check_world(self.loaded, ranks)
        if self.trains and recipe.checkpoint.init_from and not (folder and any(folder.checkpoints.glob("step-*"))):
            with self.noting("checkpoint", "init_from"):
                find_initial(recipe.checkpoint.init_from)

    def _check_turns(self) -> None:
        """The task's turns must be those of the recipe."""
        turns, given = turns_of(self.task), self.recipe.optimizer.turns
        if turns and not takes_turn(self.task):
            raise PluginError(
                f"{name_of(self.task)} has the turns {', '.join(turns)}, and its `loss` is not told which it computes",
                hints=['def loss(self, model, batch, turn: str = "")'],
            )
        there = [f"it has {', '.join(turns)}"] if turns else ["it makes one update a step: take [optimizer.turns] out"]
        for name in given.keys() - set(turns):
            error = UsageError(
                f"the task `{self.recipe.task.use}` has no turn `{name}`", hints=[*did_you_mean(name, turns), *there]
            )
            self.note(("optimizer", "turns", name), error)
        for name in [turn for turn in turns if turn not in given and self.trains]:
            error = UsageError(
                f"[optimizer.turns.{name}] is missing: the task makes an update of that name in every step",
                hints=[f"add it; where it is empty, it is as [optimizer] and trains `{name}.*`"],
            )
            self.note(("optimizer",), error)

        self.turns = {turn: given[turn] for turn in turns} if given.keys() == set(turns) else {}

    def _named(self, table: str, kind: str, components: Any) -> dict[str, Any]:
        found = {}
        for name, component in components.items():
            with self.noting(table, name):
                found[name] = build(self.registry, kind, component)
        return found

    def _check_callbacks(self) -> None:
        contract = getattr(getattr(self, "strategy", None), "contract", None)
        for name, callback in self.callbacks.items():
            with self.noting("callbacks", name):
                check_callback(name, callback, contract if self.trains else None, ('"single"', '"ddp"', '"fsdp"'))
            metric = getattr(callback, "metric", "")
            if self.trains and not self.recipe.data.evaluations and str(metric).startswith("eval/"):
                error = UsageError(f"nothing is evaluated, so nothing reports {metric}", hints=["add a [data.eval]"])
                self.note(("callbacks", name, "metric"), error)

    def _ask_metrics(self) -> None:
        """Asks the task who finishes the metrics that the recipe names, and these which direction is better."""
        for chosen in _metrics(self.recipe.task):
            metric = build(self.registry, "metric", chosen)
            if type(metric).finish is not Metric.finish and metric.name not in self.task.reports:
                raise PluginError(
                    f"task `{self.recipe.task.use}` does not say who finishes {metric.name}, which is no mean",
                    hints=["in its constructor: self.reports = {metric.name: metric for metric in metrics}"],
                )
        self.loaded = settled(self.loaded, self.task.reports)
        self.recipe = self.loaded.recipe
        if self.trains and (metric := unsettled(self.loaded)):
            error = UsageError(
                f'cannot tell whether less or more of "{metric}" is better',
                hints=['add mode = "min" or mode = "max" to `checkpoint.keep`'],
            )
            self.note(("checkpoint", "keep", "by"), error)

    def _ask_strategy(self, ranks: int, device: str | None) -> None:
        train, self._data_ranks = self.recipe.train, self.strategy.data_ranks(ranks)
        with self.noting("strategy"):
            where = device or device_type(train)
            general = general_refusals(train, self.strategy.data_ranks(ranks), where)
            turns = refusals_of_optimizers(self.recipe, contract_of(self.strategy), where) if self.trains else ()
            cut = refusals_of_parts(self.task, train, self._data_ranks) if hasattr(self, "task") else ()
            for refusal in (*general, *turns, *cut, *self.strategy.refusals(train, ranks, where)):
                self.note(tuple(refusal.key.split(".")), UsageError(refusal.message, hints=refusal.hints))
        if self.trains:
            with self.noting("train", "global_batch"):
                self.batch = check_world(self.loaded, self.strategy.data_ranks(ranks))

    def _choose_sets(self) -> None:
        """Raises UsageError unless there is something to evaluate on: every set that is asked for."""
        known = [name for name in self.recipe.data.evaluations if name]
        if not self.recipe.data.evaluations:
            raise UsageError("the recipe has no [data.eval] to evaluate on")
        for name in self._only:
            if name not in known:
                there = [f"there are {', '.join(known)}"] if known else ["its one [data.eval] has no name"]
                raise UsageError(
                    f"the recipe has no [data.eval.{name}] to evaluate on", hints=[*did_you_mean(name, known), *there]
                )

    # ---------------------------------------------------------------------------------------- data and model
    def build(self, *, meta: bool = False) -> None:
        """Builds the data, the model and the schedule, and asks whether they fit together.

        With `meta` a large model has no memory, where it can be built so: nothing but its shapes is known then.
        """
        recipe, registry = self.recipe, self.registry
        components = {"train": recipe.data.train} if self.trains else {}
        components |= {key_of(name): component for name, component in self._evaluations().items()}
        self.data = {}
        for key, component in components.items():
            with self.noting("data", *key.split(".")):
                self.data[key] = build(registry, "data", component, seed=recipe.train.seed)
        if "train" in self.data:
            self._count_steps()
        for key in self.data.keys() - {"train"}:
            with self.noting("data", *key.split(".")):
                open_data(self.data[key], **self._opened(1))
        if hasattr(self, "task") and self.task.whole_batch and hasattr(self, "strategy"):
            self._check_ends()

        # The same initial weights on every rank.
        torch.manual_seed(mix(recipe.train.seed, WEIGHTS))
        with self.noting("model"):
            self.model = self._on_meta() if meta else self._model()
            check_model(self.model)
            with self.noting("train", "freeze", faults=(ValueError,)):
                freeze(self.model, recipe.train.freeze)
            self.size = count_parameters(self.model)
            self._put_beside()
            self._fit()

    def _evaluations(self) -> dict[str, Component]:
        """The evaluation sets by name, less those that nobody asked for."""
        return {
            name: component
            for name, component in self.recipe.data.evaluations.items()
            if not self._only or name in self._only
        }

    def _model(self) -> nn.Module:
        with self.strategy.building() if hasattr(self, "strategy") else nullcontext():
            model: nn.Module = build(self.registry, "model", self.recipe.model)
        return model

    def _put_beside(self) -> None:
        """Asks the task for the modules beside the model, and whether they will do."""
        self.beside = {}
        with self.noting("task"):
            self.beside = declared(self.task, self.model) if hasattr(self, "task") else {}
            for name, beside in self.beside.items():
                check_model(beside.module)
                if f"{OWNER}{name}" in self.recipe.callbacks:
                    raise UsageError(
                        f"callbacks.{OWNER}{name} has the name of a module of the task", hints=["rename it"]
                    )
                if beside.weights is not None and not beside.is_saved:
                    find_initial(beside.weights, f"weights of {name}")

    def shares(self) -> list[str]:
        """Says how turns or groups share the model's parameters, which is built for it where that was not done."""
        if not (self.turns or self.recipe.optimizer.groups):
            return []
        found: list[str] = []
        with self.noting("optimizer", faults=(ValueError,)):
            model = self.model if hasattr(self, "model") else self._on_meta()
            found = shares(self.recipe.optimizer, model, list(self.turns))
        return found

    def _on_meta(self) -> nn.Module:
        """The model on the meta device; a small one, and one whose constructor looks at values, with its weights."""
        with suppress(NotImplementedError, RuntimeError), torch.device("meta"):
            model: nn.Module = build(self.registry, "model", self.recipe.model)
            if count_parameters(model).all > SMALL:
                return model
        model = build(self.registry, "model", self.recipe.model)
        return model

    def _fit(self) -> None:
        """Asks whether the model suits the data and the keys of the recipe that speak of it."""
        recipe = self.recipe
        with self.noting("task", faults=(ValueError,)):
            for data in self.data.values() if hasattr(self, "task") else ():
                self.task.check(self.model, data)
            self._fits = hasattr(self, "task") and bool(self.data)
        with self.noting("train", "blocks", faults=(ValueError,)):
            check_blocks(find_blocks(self.model, recipe.train.blocks), recipe.train)
        with self.noting("optimizer", faults=(ValueError,)):
            if self.trains:
                turns, blocks = list(self.turns), recipe.train.blocks
                check_parameters(self.registry, recipe.optimizer, self.model, turns, blocks)
            else:
                parameter_groups(self.model, ())

    def _count_steps(self) -> None:
        """Plans the run in steps, with all that happens every so often; builds the schedule for that length."""
        recipe, train = self.recipe, self.recipe.train
        with self.noting("data", "train"):
            check_data(self.data["train"])
            with self.noting("data", "order"):
                self.order = self._order()
            if not hasattr(self, "order"):
                return
            opened = self._opened(train.global_batch)
            batches = open_data(self.data["train"], order=self.order, **opened).steps_per_epoch
            # A step that draws several batches may go on into the next epoch: an epoch is what has all of its samples.
            per_epoch = batches and math.ceil(batches / draws_of(self.turns))
            batch = getattr(self, "batch", None) or plan_batch(train, 1)
            if plan := Plan.of(recipe, batch, per_epoch, noting=self.noting, ends=self._end_of_epochs):
                self.plan = plan
        if hasattr(self, "plan"):
            with self.noting("schedule"):
                self.schedule = build(self.registry, "schedule", recipe.schedule, horizon=self.plan.horizon)
            self.schedules = {}
            for name, turn in self.turns.items():
                with self.noting("optimizer", "turns", name, "schedule"):
                    if turn.schedule:
                        own = build(self.registry, "schedule", turn.schedule, horizon=self.plan.horizon)
                        self.schedules[name] = own

    def _end_of_epochs(self, epochs: int) -> int | None:
        """The step that so many epochs end with, where the order has epochs of different lengths."""
        batches = end_of_epochs(self.order, epochs) if self.order else None
        return batches and math.ceil(batches / draws_of(self.turns))

    def _order(self) -> Order | None:
        """The order of the training data: as the recipe says, or shuffled."""
        data, train, chosen = self.data["train"], self.recipe.train, self.recipe.data.order
        if is_stream(data):
            if chosen:
                raise UsageError(
                    f"{type(data).__name__} is an iterable dataset, whose samples come in its own order",
                    hints=["leave [data.order] out, or give a dataset with __len__ and __getitem__"],
                )
            return None
        given = {
            "data": data,
            "seed": train.seed,
            "global_batch": train.global_batch,
            "drop_last": train.last_batch == "drop",
        }
        order: Order = build(self.registry, "order", chosen, **given) if chosen else Shuffled(**given)
        return order

    def _check_ends(self) -> None:
        """Asks whether the smallest batch of every dataset leaves a sample for every rank."""
        smallest = {
            f"data.{key}": Even(data, self.recipe.train.global_batch).smallest
            for key, data in self.data.items()
            if key != "train" and hasattr(data, "__len__")
        }
        if hasattr(self, "plan") and isinstance(self.order, EpochOrder):
            total, last = self.plan.horizon.total, self.order.steps_per_epoch - 1
            if total is None or total * draws_of(self.turns) > last:
                smallest["data.train"] = self.order.size(last)
        elif hasattr(self, "plan") and self.order:
            batch, total = self.recipe.train.global_batch, self.plan.horizon.total
            steps = total and total * draws_of(self.turns)
            if refusal := refusal_of_order(self.task, self.order, batch, self._data_ranks, steps):
                self.note(("data", "order"), UsageError(refusal.message, hints=refusal.hints))
        for key, samples in smallest.items():
            if refusal := refusal_of_end(self.task, key, samples, self._data_ranks):
                self.note(tuple(key.split(".")), UsageError(refusal.message, hints=refusal.hints))

    def _opened(self, batch: int) -> dict[str, Any]:
        fetching = {"seed": self.recipe.train.seed, "workers": 0, "prefetch": 2, "pin": False}
        drop_last = self.recipe.train.last_batch == "drop"
        return fetching | {"global_batch": batch, "share": RankShare(0, 1, batch), "drop_last": drop_last}

    # ---------------------------------------------------------------------------------------- this rank's part
    is_open = False

    def open(self, world: World) -> None:
        """Deals the data out: this rank's part of the training data, and of each evaluation set."""
        recipe, train, ranks = self.recipe, self.recipe.train, world.data.size
        fetching: dict[str, Any] = {
            "seed": train.seed,
            "workers": recipe.data.workers,
            "prefetch": recipe.data.prefetch,
            "pin": world.device.type == "cuda",
        }
        if self.trains:
            self.training = open_data(
                self.data["train"],
                order=self.order,
                global_batch=self.plan.batch.global_batch,
                share=RankShare(world.data.rank, ranks, self.plan.batch.micro_batch, train.elastic_shards),
                drop_last=train.last_batch == "drop",
                **fetching,
            )
        batch = train.eval_batch or max(1, train.per_pass(ranks))
        if self.task.whole_batch:
            batch = math.ceil(train.global_batch / ranks)
        self.evaluation = {
            name: open_data(
                self.data[key_of(name)],
                order=self._order_of_evaluation(self.data[key_of(name)]),
                global_batch=batch * ranks,
                share=RankShare(world.data.rank, ranks, batch),
                drop_last=False,
                **fetching,
            )
            for name in self._evaluations()
        }
        self.is_open = True

    def _order_of_evaluation(self, data: Any) -> Order | None:
        whole = self.task.whole_batch and not is_stream(data)
        return Even(data, self.recipe.train.global_batch) if whole else None

    # ---------------------------------------------------------------------------------------- a few samples
    def try_out(self) -> dict[str, Rehearsal]:
        """Fetches a few samples of each dataset and evaluates them; returns what came of it, by the dataset's key."""
        found: dict[str, Rehearsal] = {}
        if not self._fits:
            return found
        for key, data in self.data.items():
            if hasattr(data, "__len__") and not len(data):
                continue  # which was told when steps were counted
            with self.noting("task"), self._telling(f"data.{key}"), own_random_numbers():
                batch = first_batch(data, most=self._most(key), seed=self.recipe.train.seed)
                found[key] = self._rehearse(key, batch, self._gpu())
        evaluated = {name: found[key].metrics for name in self._evaluations() if (key := key_of(name)) in found}
        if evaluated.keys() == self._evaluations().keys() and _is_ours(self.task):
            self._find_metrics(evaluated)
        return found

    def rehearse(self) -> None:
        """Looks at the first samples that training will use, and notes breaches of contract.

        Nothing is done that could matter for the run or be noticed by it: what is fetched is fetched once, loader
        processes fetch by themselves, and neither a plugin's loss nor a model from the recipe's own files is called, as
        they may do more than compute. An error in a model's forward pass that training would meet as well is told; any
        other (a model may need a GPU) is left to the first step.
        """
        home = type(self.task).loss.__module__ if self._fits and self.trains else ""
        ours = home.startswith(_OURS)
        calls = self._may_call_model() and (ours or home.startswith(PREFIX))
        if not (ours or calls) or self.recipe.data.workers:
            return
        with self.noting("task"), own_random_numbers():
            whole = None
            try:
                whole = self._first()
                batch = _few(whole)
                if calls:
                    metrics = self._rehearse("train", batch, None).metrics
                    if ours:
                        self._find_metrics(dict.fromkeys(self._evaluations(), metrics))
                else:
                    try_before_model(self.task, batch)
            except ForgeError:
                raise
            except Exception as error:
                if calls and self._fails_in_training(error, whole):
                    with self._telling("data.train"):
                        raise
                log.debug("the first batch could not be evaluated before training: %s", error)

    def _fails_in_training(self, error: Exception, batch: Any) -> bool:
        """True if the model, which only computes, raises this error for a whole micro-batch and wherever ranks compute.

        Others' callbacks and strategies may change the model, or what the task gives it, before the first step; the
        framework itself does so for `sync_batchnorm`, and casts for fp16.
        """
        train, others = self.recipe.train, [*self.callbacks.values(), getattr(self, "strategy", None)]
        if train.sync_batchnorm or train.precision == "fp16" or not self._in_forward(error):
            return False
        if any(not type(part).__module__.startswith("ddpforge.") for part in others):
            return False
        if not self.is_open and self._most("train") > FEW:
            return False  # `batch` is not a whole one
        try:
            # On the meta device shapes and dtypes fail as on any other.
            self._rehearse("train", batch, None if device_type(train) == "cpu" else "meta")
        except Exception as again:
            return type(again) is type(error) and self._in_forward(again)
        return False

    def _in_forward(self, error: Exception) -> bool:
        """True if the error was raised within the forward pass of such a model."""
        forward = getattr(type(self.model).forward, "__code__", None)
        return any(frame.f_code is forward for frame, _ in walk_tb(error.__traceback__))

    def _may_call_model(self) -> bool:
        if not self._fits:
            return False
        models = [self.model, *self._modules_beside()]
        if sum(count_parameters(model).all for model in models) > SMALL:
            return False
        local = any(type(module).__module__.startswith(PREFIX) for model in models for module in model.modules())
        return not local and not any(parameter.is_meta for parameter in self.model.parameters())

    def _modules_beside(self) -> list[nn.Module]:
        return [beside.module for beside in self.beside.values()]

    def _first(self) -> Any:
        if self.is_open:
            return self.training.first().data
        return first_batch(self.data["train"], most=self._most("train"), seed=self.recipe.train.seed)

    def _gpu(self) -> str | None:
        """The type of device that ranks will compute on; None if the model is there already."""
        return "cuda" if device_type(self.recipe.train) == "cuda" and torch.cuda.is_available() else None

    def _most(self, key: str) -> int:
        train = self.recipe.train
        micro = self.batch.micro_batch if hasattr(self, "batch") else train.global_batch
        return (train.eval_batch if key != "train" else None) or micro

    def _rehearse(self, key: str, batch: Any, device: str | None) -> Rehearsal:
        use = "training" if key == "train" else "evaluation"
        beside, precision = self._modules_beside(), self.recipe.train.precision
        return rehearse(self.model, self.task, batch, use=use, precision=precision, device=device, beside=beside)

    def _find_metrics(self, sets: Mapping[str, Mapping[str, float]]) -> None:
        """Asks whether the metrics by which the recipe decides are those of a set; `sets` has the metrics of each.

        Tasks that are not ours name some only now and then.
        """
        if overriding(self.callbacks, "while_evaluating"):
            return  # what they report is known when they do
        known = {f"{prefix(name)}{metric}" for name, metrics in sets.items() for metric in metrics}
        wanted: list[tuple[KeyPath, object]] = [
            (("callbacks", name, "metric"), getattr(callback, "metric", ""))
            for name, callback in self.callbacks.items()
        ]
        for path, metric in [*wanted, (("checkpoint", "keep", "by"), self.recipe.checkpoint.keep.by)]:
            if known and str(metric).startswith("eval/") and metric not in known:
                error = UsageError(f"no evaluation reports {metric}", hints=[f"there are {', '.join(sorted(known))}"])
                self.note(path, error)

    @contextmanager
    def _telling(self, key: str) -> Iterator[None]:
        """Turns an error of a component into one that says what was being tried."""
        try:
            yield
        except ForgeError:
            raise
        except Exception as error:
            raise UsageError(
                f"a batch of [{key}] cannot be evaluated: {type(error).__name__}: {error}",
                hints=[*getattr(error, "__notes__", ()), *where_raised(error)],
            ) from error

    # ---------------------------------------------------------------------------------------- what was found
    @contextmanager
    def noting(self, *path: str, faults: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Notes an error in here, at its place in the recipe; `faults` are other exceptions that are the recipe's."""
        try:
            yield
        except NotImported as error:
            if error.use not in self.not_imported:  # within another component's options
                self.not_imported.append(error.use)
        except RecipeError as error:
            self._problems += error.problems
            self._errors.append(error)
        except ForgeError as error:
            self.note(path, error)
        except faults as error:
            self.note(path, UsageError(str(error)))

    def note(self, path: KeyPath, error: ForgeError) -> None:
        """Notes an error in what stands at `path` of the recipe."""
        key = self._blamed(path, error.message)
        self._problems.append(self.loaded.problem(key, error.message, *error.hints, trace=error.trace))
        self._errors.append(error)

    def _blamed(self, path: KeyPath, message: str) -> KeyPath:
        """The key that the message names, in full or as one below `path`; `path` itself where it names none."""
        words = re.findall(r"[A-Za-z_]\w*(?:\.\w+)*", message)
        keys = [tuple(word.split(".")) for word in words if "." in word]
        keys += [(*path, word) for word in words if word != "use"]
        origins = self.loaded.origins
        return next((key for key in keys if key in origins and (len(key) > len(path) or key == path)), path)

    @property
    def found(self) -> bool:
        """True if anything cannot work."""
        return bool(self._problems)

    def report(self) -> None:
        """Raises what was found: one error of this machine as it is, all else as a RecipeError with every problem."""
        if not self._problems:
            return
        of_machine = [isinstance(error, EnvironmentProblem) for error in self._errors]
        if len(self._errors) == 1 and of_machine[0] and not isinstance(self._errors[0], PluginError):
            raise self._errors[0]
        error = RecipeError(sorted(dict.fromkeys(self._problems), key=_position))
        if all(found.exit_code == ExitCode.ENVIRONMENT for found in self._errors):
            error.exit_code = ExitCode.ENVIRONMENT
        raise error


def key_of(name: str) -> str:
    """The recipe's key of an evaluation set, below `data`."""
    return f"eval.{name}" if name else "eval"


def _metrics(task: Component) -> Iterator[Nested]:
    """Yields the metrics that a recipe names for its task."""
    for value in task.options.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Nested) and one.kind == "metric":
                yield one


def _is_ours(task: Task) -> bool:
    return type(task).__module__.startswith(_OURS)


def _position(problem: Problem) -> tuple[bool, str, int, int]:
    place = problem.place or Place("")
    return not place.line, place.file, place.line, place.column


def _few(batch: Any) -> Any:
    """The first samples of a batch, where it can be cut."""
    try:
        return take(batch, 0, min(size(batch), FEW))
    except ValueError:
        return batch
