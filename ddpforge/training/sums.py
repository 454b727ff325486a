"""Finds a loss that is a mean where a sum is wanted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from ddpforge.data.nests import take
from ddpforge.data.randomness import own_random_numbers
from ddpforge.errors import UsageError
from ddpforge.interfaces import Task
from ddpforge.training.first_look import name_of

__all__ = ["SMALL", "Halves", "refuse_mean"]

SMALL = 50_000_000  # parameters of a model that is copied and evaluated in a moment


class Halves(NamedTuple):
    """Two batches of as many samples, and one of all of these."""

    first: Any
    second: Any
    whole: Any
    samples: int  # of the whole


def refuse_mean(
    model: nn.Module, task: Task, batch: Any, samples: int, fetch: Callable[[], Halves] | None = None
) -> None:
    """Raises UsageError for a loss that is a mean: that of a batch of `samples` is then not the sum over its halves.

    A batch that cannot be cut is left alone, unless `fetch` gives halves of another one. Losses that are neither
    (samples of a batch may be compared with each other) are their author's business. Model and task are copied, as they
    may keep something of what they see.
    """
    try:
        model, task = copy.deepcopy((model, task))
        model.eval()  # samples must not depend on their neighbours
        *parts, samples = _cut(batch, samples, fetch)
        first, second, whole = (_loss(model, task, part) for part in parts)
        again = _loss(model, task, parts[-1], seed=1)
        items = [task.count(part) for part in parts]
    except Exception:
        return  # not every task takes any cut, and not every part can be copied
    if samples == 0 or whole != again or not _same(2 * whole, first + second) or _same(whole, first + second):
        return
    if items[2] is not None and not _same(float(items[2]), sum(float(each or 0) for each in items[:2])):
        return  # its items are batches: the mean over one is the sum over its items
    raise UsageError(
        f"{name_of(task)}.loss returns a mean over the batch: {whole:.6g} for {samples} samples, and {first:.6g} and "
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


def _loss(model: nn.Module, task: Task, batch: Any, *, seed: int = 0) -> float:
    with own_random_numbers(), torch.no_grad():
        torch.manual_seed(seed)
        return float(task.loss(model, batch)[0])


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= 1e-3 * max(abs(one), abs(other))
