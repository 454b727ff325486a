"""A few samples through a model, its loss and its metrics before training, in copies that nothing else uses."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import nn

from ddpforge.builtin.tasks.forms import described
from ddpforge.data import MicroBatch, RankShare, open_data, to_device
from ddpforge.data.randomness import own_random_numbers
from ddpforge.errors import PluginError
from ddpforge.interfaces import Metric, Rows, Task, Total, World
from ddpforge.ranks.collectives import Alone
from ddpforge.training.first_look import checked_loss, checked_metrics, explain, first_metrics
from ddpforge.training.one_turn import of_turns, with_sum
from ddpforge.training.sums import Halves, refuse_mean
from ddpforge.training.totals import add

__all__ = ["FEW", "Rehearsal", "first_batch", "first_halves", "rehearse", "try_before_model"]

log = logging.getLogger("ddpforge")

FEW = 8  # samples
_DTYPES = {"bf16": torch.bfloat16}  # CPUs have few kernels for fp16


@dataclass(frozen=True)
class Rehearsal:
    """The result of a batch: its form, and means; these are empty where the model has no memory."""

    batch: str
    metrics: Mapping[str, float] = field(default_factory=dict)


def first_batch(data: Any, *, most: int, seed: int) -> MicroBatch:
    """The first samples of a dataset as a batch, `most` of them at most."""
    (batch,) = _first(data, min(FEW, most), parts=1, seed=seed)
    return batch


def first_halves(data: Any, *, most: int, seed: int) -> Halves:
    """The same, and its halves, each fetched by itself."""
    samples = min(FEW, most) // 2 * 2
    (whole,), (one, other) = (_first(data, samples, parts=parts, seed=seed) for parts in (1, 2))
    return Halves(one.data, other.data, whole.data, samples)


def _first(data: Any, samples: int, *, parts: int, seed: int) -> list[MicroBatch]:
    share = RankShare(0, 1, samples // parts)
    fetching: dict[str, Any] = {"seed": seed, "workers": 0, "prefetch": 2, "pin": False}
    batches = open_data(data, global_batch=samples, share=share, drop_last=False, **fetching)
    return list(islice(batches.evaluation(), parts))


class _Reached(Exception):
    """A task has come as far as the model."""


class _NoModel(nn.Module):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise _Reached


def try_before_model(task: Task, batch: Any) -> None:
    """Lets a task take a batch apart, up to where it would call the model; raises what it raises before that."""
    for one in of_turns(task).values():
        with suppress(_Reached):
            one.loss(_NoModel(), batch)


def rehearse(
    model: nn.Module,
    task: Task,
    batch: MicroBatch,
    *,
    use: str,
    precision: str = "fp32",
    device: str | None = None,
    beside: Sequence[nn.Module] = (),
    halves: Callable[[], Halves] | None = None,
) -> Rehearsal:
    """One forward pass, or one of each turn, in a copy of model and task; `use` is "training" or "evaluation".

    It takes place on `device`, by default where the model is; there the modules `beside` it, the task's, are moved too.
    `halves` gives some samples once more, for a batch that cannot be cut.

    Raises UsageError or PluginError where the task breaks its contract, and whatever model and task raise.
    """
    metrics: dict[str, float] = {}
    for one in of_turns(task).values():
        found = _rehearse(model, one, batch, use, precision, device, beside, halves)
        metrics |= found.metrics
    metrics = with_sum(task, metrics)
    return Rehearsal(found.batch, metrics)


def _rehearse(
    model: nn.Module,
    task: Task,
    micro: MicroBatch,
    use: str,
    precision: str,
    device: str | None,
    beside: Sequence[nn.Module],
    halves: Callable[[], Halves] | None,
) -> Rehearsal:
    model, task, beside = copy.deepcopy((model, task, list(beside)))
    model.train(use == "training")
    place = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if device is not None and place.type != "meta":
        place = torch.device(device)
        model.to(place)
    for module in beside:
        module.to(place)
    given, batch = micro.data, to_device(micro.data, place)
    alone = Alone(place)
    try:
        task.start(model, World(all=alone, data=alone, device=place, local_rank=0))
        # As it is run: an evaluation computes no gradients.
        with torch.set_grad_enabled(use == "training"), _autocast(precision, place.type), own_random_numbers():
            loss, outputs = checked_loss(task, task.loss(model, batch), gradients=use == "training")
            with torch.no_grad():
                found = checked_metrics(task, first_metrics(task, outputs, batch))
                add({**found}, checked_metrics(task, first_metrics(task, outputs, batch)))
            _refuse_unfinished(found, task)
    except Exception as error:
        explain(error, task, given, use)
        raise
    if place.type == "meta":
        return Rehearsal(described(given))
    if use == "training" and not task.whole_batch:
        refuse_mean(model, task, batch, micro.samples, halves and (lambda: to_device(halves(), place)))
    counted = task.count(batch)
    items = micro.samples if counted is None else float(counted)
    if not items:
        log.warning("no target counts among the first %d samples for %s", micro.samples, use)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # so few samples may well lack a class
        means = alone.mean({"loss": Total(loss.detach(), max(items, 1e-12)), **found}, task.reports)
    return Rehearsal(described(given), task.finish(means))


def _refuse_unfinished(found: Mapping[str, Total | Rows], task: Task) -> None:
    """Raises PluginError for rows that no metric makes a number of."""
    for name, quantity in found.items():
        metric = task.reports.get(name)
        if isinstance(quantity, Rows) and (metric is None or type(metric).finish is Metric.finish):
            raise PluginError(
                f"metric `{name}` returns Rows, and nothing finishes it",
                hints=[
                    "give the Metric a `finish(self, *columns)`, which is called with the rows of all ranks, and the "
                    "task `self.reports = {metric.name: metric}`"
                ],
            )


def _autocast(precision: str, device: str) -> Any:
    on_cpu = "cpu" if device == "meta" else device
    return torch.autocast(on_cpu, dtype=_DTYPES[precision]) if precision in _DTYPES else nullcontext()
