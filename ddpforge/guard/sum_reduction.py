"""Checks that a task's loss is a sum over the batch and not a mean: then it is the sum of the losses of its halves."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from ddpforge.components.local_code import component_name
from ddpforge.data import MicroBatch, to_device
from ddpforge.data.pytree import take
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import UsageError
from ddpforge.interfaces import Replica, Task, World
from ddpforge.training.buffers import unchanged
from ddpforge.training.checks import FirstStepCheck
from ddpforge.training.contract import SMALL, contract_of
from ddpforge.training.stages import Dealt

__all__ = ["Halves", "check_first_loss", "check_sum_reduction", "compare_halves"]

log = logging.getLogger("ddpforge")


def compare_halves(dealt: Dealt, world: World) -> FirstStepCheck | None:
    """Returns the check of the first step's loss; None if it was compared before, or a copy of the model is costly."""
    whole = "weights" not in contract_of(dealt.strategy).shards and dealt.recipe.train.compile == "off"
    if not dealt.compares or dealt.task.whole_batch or not whole or dealt.size.all > SMALL:
        return None
    return partial(check_first_loss, world)


def check_first_loss(world: World, replica: Replica, task: Task, stateful: nn.Module, first: MicroBatch) -> None:
    """Raises UsageError before the first step for a loss that is a mean, if no earlier check called the loss."""
    batch = replica.local_batch(to_device(first.data, world.device))
    with replica.forward(), unchanged(stateful):  # a copy's forward may be bound to the model
        check_sum_reduction(replica.unwrapped, task, batch, first.samples)


class Halves(NamedTuple):
    """Two batches of equal size, and a batch of the samples of both."""

    first: Any
    second: Any
    whole: Any
    samples: int  # of the whole


def check_sum_reduction(
    model: nn.Module, task: Task, batch: Any, samples: int, fetch: Callable[[], Halves] | None = None
) -> None:
    """Raises UsageError for a loss that is a mean: then the loss of a batch is the mean of its halves, not the sum.

    A batch (of `samples` samples) that cannot be cut is not checked, unless `fetch` returns halves of another batch. A
    loss that is neither sum nor mean is accepted: it may compare the samples of a batch. Model and task are copied,
    because they may store their inputs.
    """
    try:
        model, task = copy.deepcopy((model, task))
        model.train(not task.evaluation_loss)  # in evaluation mode, samples do not depend on their neighbours
        *parts, samples = _cut(batch, samples, fetch)
        sizes = (samples // 2, samples // 2, samples)
        first, second, whole = (_loss(model, task, part, size) for part, size in zip(parts, sizes, strict=True))
        again = _loss(model, task, parts[-1], samples, seed=1)
        items = [task.count(part) for part in parts]
    except Exception:
        return  # some tasks cannot take a part of a batch, and some parts cannot be copied
    if samples == 0 or whole != again or _same(whole, first + second):
        return
    declared = getattr(task, "reduction", "")  # of `model_loss`, and of loss functions
    if declared == "mean" and _same(whole, 2 * (first + second)):
        raise UsageError(
            f"the loss is a sum over the batch, but task.reduction is mean: {whole:.6g} for {samples} samples, "
            f"and {first:.6g} and {second:.6g} for its halves",
            hints=['set task.reduction = "sum"'],
            key="task.reduction",
        )
    if not _same(2 * whole, first + second):
        if declared:
            log.warning(
                "the loss of a batch is %.6g, but those of its halves are %.6g and %.6g: it is not a sum over the "
                "samples (class weights? samples that are compared?), so that the curve depends on train.micro_batch "
                "and the number of ranks; `class_weights` of task classification does not",
                *(whole, first, second),
            )
        return
    if declared == "sum":
        raise UsageError(
            f"the loss is a mean over the batch, but task.reduction is sum: {whole:.6g} for {samples} samples, "
            f"and {first:.6g} and {second:.6g} for its halves",
            hints=['set task.reduction = "mean"'],
            key="task.reduction",
        )
    if items[2] is not None and not _same(float(items[2]), sum(float(each or 0) for each in items[:2])):
        return  # its items are batches: the mean over one is the sum over its items
    raise UsageError(
        f"{component_name(task)}.loss returns a mean over the batch: {whole:.6g} for {samples} samples, "
        f"and {first:.6g} and "
        f"{second:.6g} for its halves",
        hints=[
            'return the sum, e.g. with reduction="sum", or the mean times the samples: ddpforge divides by the items '
            "of the whole global batch"
        ],
    )


def _cut(batch: Any, samples: int, fetch: Callable[[], Halves] | None) -> Halves:
    half = samples // 2
    try:
        first, second = (take(batch, start, start + half, samples) for start in (0, half))
        return Halves(first, second, take(batch, 0, 2 * half, samples), 2 * half)
    except ValueError:
        if fetch is None:
            raise
        return fetch()


def _loss(model: nn.Module, task: Task, batch: Any, samples: int, *, seed: int = 0) -> float:
    task.batch_samples = samples
    with isolated_rng(), torch.no_grad():
        torch.manual_seed(seed)
        return float(task.loss(model, batch)[0])


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other))
