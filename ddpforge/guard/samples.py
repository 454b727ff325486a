"""Checks of the first samples: runs them through data, model, loss and metrics, in copies that nothing else uses."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from traceback import walk_tb
from typing import Any

import torch
from torch import nn

from ddpforge.components.local_code import is_local
from ddpforge.data import MicroBatch, RankShare, to_device
from ddpforge.data.collating import BatchKeys
from ddpforge.data.pytree import take
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import ForgeError, PluginError, UsageError
from ddpforge.features.sources import by_name
from ddpforge.guard.batch_checks import raise_if_batch_explains
from ddpforge.guard.sum_reduction import Halves, check_sum_reduction
from ddpforge.interfaces import Metric, SampleColumns, Task, Total, World
from ddpforge.interfaces.forms import described
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.devices import chosen_kind, device_type
from ddpforge.training.callbacks import overriding
from ddpforge.training.contract import SMALL, count_parameters
from ddpforge.training.evaluation import metric_prefix
from ddpforge.training.loaders import open_data
from ddpforge.training.problems import Problems
from ddpforge.training.stages import MISSING, Built, Dealt, key_of
from ddpforge.training.task_checks import (
    checked_loss,
    checked_metrics,
    explain,
    first_metrics,
    naming_dataset,
)
from ddpforge.training.totals import add
from ddpforge.training.updates import UpdateTask, tasks_by_update, with_summed_loss

__all__ = ["CHECKS", "FirstSamples", "check_each_dataset", "check_first_batch", "evaluate"]

log = logging.getLogger("ddpforge")

FEW = 8  # samples
_DTYPES = {"bf16": torch.bfloat16}  # CPUs have few kernels for fp16
_BUILTIN = "ddpforge.builtin.tasks."


@dataclass(frozen=True)
class FirstSamples:
    """Form of a batch, and means of its loss and metrics; `metrics` is empty if the model has no memory."""

    batch: str
    metrics: Mapping[str, float] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- the two checks
def check_each_dataset(built: Built, problems: Problems) -> dict[str, FirstSamples]:
    """Evaluates a few samples of every dataset; returns the results by the dataset's key.

    For `ddpforge check --build`: it calls any code of the recipe, in copies of model and task.
    """
    found: dict[str, FirstSamples] = {}
    first: dict[str, Any] = {"seed": built.recipe.train.seed, "keys": BatchKeys.of(built.recipe.data)}
    for key, data in _sets(built):
        path = ("data", *key.split("."))
        if problems.has(*path):
            continue  # e.g. it is empty
        most = _samples(built, key)
        batches: list[MicroBatch] = []
        with problems.at(*path), naming_dataset(f"data.{key}"), isolated_rng():
            batches.append(first_batch(data, most=most, **first))
        with problems.at("task"), naming_dataset(f"data.{key}"), isolated_rng():
            for batch in batches:
                halves = partial(first_halves, data, most=most, **first)
                try:
                    found[key] = _evaluate(built, key, batch, _gpu(built), halves)
                except Exception as error:
                    raise_if_batch_explains(error, built.model, batch.data, f"data.{key}")
                    raise
    evaluated = {name: found[key].metrics for name in built.evaluations() if (key := key_of(name)) in found}
    if evaluated.keys() == built.evaluations().keys() and _is_builtin(built.task):
        _check_chosen_metrics(built, evaluated, problems)
    return found


def _sets(built: Built) -> Iterator[tuple[str, Any]]:
    """Yields every dataset with its key, and each source of training data as one."""
    for key, data in built.data.items():
        yield from ((f"{key}.{name}" if name else key, one) for name, one in by_name(data).items())


def check_first_batch(stage: Built, problems: Problems) -> bool:
    """Evaluates the first samples of training; returns True if the loss was compared with the loss of its halves.

    It must not affect the run. So each sample is fetched only once, and nothing is done if loader processes fetch. A
    plugin's loss, and a model from the recipe's own files, are not called: they may have side effects. An error in the
    model's forward pass is a problem if training would raise it too. Any other error (a model may need a GPU) is left
    to the first step.
    """
    home = type(stage.task).loss.__module__ if stage.trains else ""
    builtin = home.startswith(_BUILTIN)
    calls_model = _may_call_model(stage) and (builtin or is_local(home))
    if not (builtin or calls_model) or _has_loaders(stage):
        return False
    whole = None
    with problems.at("task"), isolated_rng():
        try:
            before = len(problems)
            with problems.at("data", "train"):
                whole = stage.training.first() if isinstance(stage, Dealt) else _first_of(stage)
            if len(problems) > before or whole is None:
                return False
            batch = _shortened(whole)
            if not calls_model:
                _call_up_to_model(stage.task, batch.data)
                return False
            metrics = _evaluate(stage, "train", batch, None).metrics
            if builtin:
                _check_chosen_metrics(stage, dict.fromkeys(stage.evaluations(), metrics), problems)
            return True
        except ForgeError:
            raise
        except Exception as error:
            if calls_model and whole and _fails_in_training(stage, error, whole):
                raise_if_batch_explains(error, stage.model, whole.data, "data.train")
                with naming_dataset("data.train"):
                    raise
            log.debug("the first batch could not be evaluated before training: %s", error)
    return False


def _has_loaders(stage: Built) -> bool:
    """True if loader processes fetch the training data."""
    if isinstance(stage, Dealt):
        return bool(stage.training.workers)
    return stage.recipe.data.workers not in (0, "auto")


def _first_of(built: Built) -> MicroBatch:
    keys = BatchKeys.of(built.recipe.data)
    first = next(iter(by_name(built.data["train"]).values()))
    return first_batch(first, most=_samples(built, "train"), seed=built.recipe.train.seed, keys=keys)


def _fails_in_training(stage: Built, error: Exception, batch: MicroBatch | None) -> bool:
    """True if the model raises this error also for a whole micro-batch, and on the device of the ranks."""
    # Callbacks and strategies of plugins may change the model, or its inputs, before the first step. ddpforge itself
    # changes the model for `sync_batchnorm`, and casts for fp16.
    train, others = stage.recipe.train, [*stage.callbacks.values(), stage.strategy]
    if train.sync_batchnorm or train.precision == "fp16" or not _in_forward(stage.model, error):
        return False
    if any(not type(part).__module__.startswith("ddpforge.") for part in others):
        return False
    if batch is None or (not isinstance(stage, Dealt) and _samples(stage, "train") > FEW):
        return False  # `batch` is not a whole one
    try:
        # On the meta device, wrong shapes and dtypes fail as on any other device.
        _evaluate(stage, "train", batch, None if device_type(train) == "cpu" else "meta")
    except Exception as again:
        return type(again) is type(error) and _in_forward(stage.model, again)
    return False


def _in_forward(model: nn.Module, error: Exception) -> bool:
    """True if the error was raised within the `forward` of the model's class."""
    forward = getattr(type(model).forward, "__code__", None)
    return any(frame.f_code is forward for frame, _ in walk_tb(error.__traceback__))


def _may_call_model(built: Built) -> bool:
    models = [built.model, *(beside.module for beside in built.auxiliary.values())]
    if sum(count_parameters(model).all for model in models) > SMALL:
        return False
    local = any(is_local(type(module).__module__) for model in models for module in model.modules())
    return not local and not any(parameter.is_meta for parameter in built.model.parameters())


def _is_builtin(task: Task) -> bool:
    return type(task).__module__.startswith(_BUILTIN)


def _gpu(built: Built) -> str | None:
    """Returns the type of device that the ranks will compute on; None if it is the CPU, or there is no GPU here."""
    kind = chosen_kind(built.recipe.train)
    return kind.type if not kind.is_host and kind.is_available() else None


def _samples(built: Built, key: str) -> int:
    """Returns the number of samples in a forward pass on the dataset `key`."""
    train = built.recipe.train
    micro = train.global_batch if built.batch is MISSING else built.batch.micro_batch
    return (train.eval_batch if key.startswith("eval") else None) or micro


def _check_chosen_metrics(built: Built, sets: Mapping[str, Mapping[str, float]], problems: Problems) -> None:
    """Adds a problem for each metric that the recipe decides by and no set reports; `sets` has the metrics of each set.

    Only for built-in tasks: tasks of plugins may report some metrics in some evaluations only.
    """
    if overriding(built.callbacks, "while_evaluating"):
        return  # their metrics are known after an evaluation
    known = {f"{metric_prefix(name)}{metric}" for name, metrics in sets.items() for metric in metrics}
    wanted = {f"callbacks.{name}.metric": getattr(one, "metric", "") for name, one in built.callbacks.items()}
    wanted["checkpoint.keep.monitor"] = built.recipe.checkpoint.keep.monitor
    for key, metric in wanted.items():
        if known and str(metric).startswith("eval/") and metric not in known:
            hints = [f"there are {', '.join(sorted(known))}"]
            problems.add(tuple(key.split(".")), UsageError(f"no evaluation reports {metric}", hints=hints))


# ---------------------------------------------------------------------------------------------- batches
def first_batch(data: Any, *, most: int, seed: int, keys: BatchKeys) -> MicroBatch:
    """Returns the first samples of a dataset, at most `most`, as a batch."""
    (batch,) = _first(data, min(FEW, most), parts=1, seed=seed, keys=keys)
    return batch


def first_halves(data: Any, *, most: int, seed: int, keys: BatchKeys) -> Halves:
    """Returns the first samples of a dataset, and their halves, each fetched separately."""
    samples = min(FEW, most) // 2 * 2
    (whole,), (one, other) = (_first(data, samples, parts=parts, seed=seed, keys=keys) for parts in (1, 2))
    return Halves(one.data, other.data, whole.data, samples)


def _first(data: Any, samples: int, *, parts: int, seed: int, keys: BatchKeys) -> list[MicroBatch]:
    share = RankShare(0, 1, samples // parts)
    fetching: dict[str, Any] = {"seed": seed, "workers": 0, "prefetch": 2, "pin": False, "keys": keys}
    batches = open_data(data, global_batch=samples, share=share, drop_last=False, **fetching)
    return list(islice(batches.evaluation(), parts))


def _shortened(batch: MicroBatch) -> MicroBatch:
    """Returns the first samples of a batch; all of them if it cannot be cut."""
    samples = min(batch.samples, FEW)
    try:
        return batch._replace(data=take(batch.data, 0, samples, batch.samples), samples=samples)
    except ValueError:
        return batch


# ---------------------------------------------------------------------------------------------- a forward pass
class _Reached(Exception):
    """Raised by a placeholder for the model: the task has called it."""


class _NoModel(nn.Module):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise _Reached


def _call_up_to_model(task: Task, batch: Any) -> None:
    """Calls a task's loss until it calls the model; raises the task's errors before that."""
    for one in tasks_by_update(task).values():
        with suppress(_Reached):
            one.loss(_NoModel(), batch)


def _evaluate(
    built: Built, key: str, batch: MicroBatch, device: str | None, halves: Callable[[], Halves] | None = None
) -> FirstSamples:
    return evaluate(
        built.model,
        built.task,
        batch,
        use="evaluation" if key.startswith("eval") else "training",
        precision=built.recipe.train.precision,
        device=device,
        beside=[one.module for one in built.auxiliary.values()],
        halves=halves,
    )


def evaluate(
    model: nn.Module,
    task: Task,
    batch: MicroBatch,
    *,
    use: str,
    precision: str = "fp32",
    device: str | None = None,
    beside: Sequence[nn.Module] = (),
    halves: Callable[[], Halves] | None = None,
) -> FirstSamples:
    """Runs one forward pass, or one of each update, in a copy of model, task and auxiliary modules.

    Args:
        use: "training" or "evaluation"; a training loss must be a sum, not a mean.
        device: the type of device to compute on; None is the device of the model.
        beside: the auxiliary modules of the task, which move with the model.
        halves: fetches a batch and its halves, if `batch` cannot be cut.

    Raises UsageError or PluginError if the task breaks its contract, and the errors of model and task.
    """
    metrics: dict[str, float] = {}
    for one in tasks_by_update(task).values():
        metrics |= _evaluate_update(model, one, batch, use, precision, device, beside, halves)
    return FirstSamples(described(batch.data), with_summed_loss(task, metrics) if metrics else {})


def _evaluate_update(
    model: nn.Module,
    task: Task,
    micro: MicroBatch,
    use: str,
    precision: str,
    device: str | None,
    beside: Sequence[nn.Module],
    halves: Callable[[], Halves] | None,
) -> Mapping[str, float]:
    model, task, beside = copy.deepcopy((model, task, list(beside)))
    model.train(use == "training")
    (task.task if isinstance(task, UpdateTask) else task).evaluates = use == "evaluation"
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device is not None and place.type != "meta":
        place = torch.device(device)
        model.to(place)
    for module in beside:
        module.to(place)
    batch = to_device(micro.data, place)
    alone = SingleRank(place)
    try:
        task.start(model, World(global_ranks=alone, dp_ranks=alone, device=place, local_rank=0))
        # As in a run: an evaluation computes no gradients.
        with torch.set_grad_enabled(use == "training"), _autocast(precision, place.type), isolated_rng():
            task.batch_samples = micro.samples
            loss, outputs = checked_loss(task, task.loss(model, batch), gradients=use == "training")
            with torch.no_grad():
                found = checked_metrics(task, first_metrics(task, outputs, batch))
                add({**found}, checked_metrics(task, first_metrics(task, outputs, batch)))
            _check_finished(found, task)
    except Exception as error:
        explain(error, task, micro.data, use)
        raise
    if place.type == "meta":
        return {}
    if use == "training" and not task.whole_batch:
        check_sum_reduction(model, task, batch, micro.samples, halves and (lambda: to_device(halves(), place)))
    counted = task.count(batch)
    items = micro.samples if counted is None else float(counted)
    if not items:
        log.warning("no target counts among the first %d samples for %s", micro.samples, use)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a few samples may lack a class
        losses = {} if loss is None else {"loss": Total(loss.detach(), max(items, 1e-12))}
        means = alone.reduce_metrics({**losses, **found}, task.reports)
    return task.finish(means)


def _check_finished(found: Mapping[str, Total | SampleColumns], task: Task) -> None:
    """Raises PluginError for rows that no metric turns into a number."""
    for name, quantity in found.items():
        metric = task.reports.get(name)
        if isinstance(quantity, SampleColumns) and (metric is None or type(metric).finish is Metric.finish):
            raise PluginError(
                f"metric `{name}` returns SampleColumns, but no Metric finishes it",
                hints=[
                    "give the Metric a `finish(self, *columns)`, which receives the rows of all ranks, and set "
                    "`self.reports = {metric.name: metric}` in the task"
                ],
            )


def _autocast(precision: str, device: str) -> Any:
    on_cpu = "cpu" if device == "meta" else device
    return torch.autocast(on_cpu, dtype=_DTYPES[precision]) if precision in _DTYPES else nullcontext()


CHECKS = (("task", check_first_batch),)
