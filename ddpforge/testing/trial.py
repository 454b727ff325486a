"""Builds a model, a batch and a task that fit the component under test."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ddpforge.api import MicroBatch, RankShare, SingleRank, open_data, take, tasks_by_update
from ddpforge.features.auxiliary import declared
from ddpforge.interfaces import Task, World
from ddpforge.testing import fixtures
from ddpforge.testing.cases import Case
from ddpforge.testing.report import Breach, blame, source_of

__all__ = ["SAMPLES", "ComponentTrial", "first_batches", "fresh", "settle", "trial_of"]

SAMPLES = 6  # has several divisors, because batches are split


@dataclass(frozen=True)
class ComponentTrial:
    """Components that fit together. `batch` has `samples` samples: SAMPLES, or all if the data has fewer.

    `updates` has the task's view for each of its alternating updates, or only the task itself.
    """

    model: nn.Module
    data: Any
    updates: list[Task]
    batch: Any
    samples: int

    def pieces(self, size: int) -> list[Any]:
        """Returns the batch in pieces of `size` samples; fetches them from the data if the batch cannot be split."""
        try:
            return [take(self.batch, start, start + size, self.samples) for start in range(0, self.samples, size)]
        except ValueError:
            return [piece.data for piece in first_batches(self.data, size)]

    @property
    def task(self) -> Task:
        """Returns the task, in the view of its first update."""
        return self.updates[0]


def fresh(case: Case, seed: int = 0) -> nn.Module:
    """Builds the model of a case with initial weights from `seed`."""
    torch.manual_seed(seed)
    model = case.build() if case.kind == "model" else case.companion("model")
    if not isinstance(model, nn.Module):
        raise Breach("a torch.nn.Module", f"a {type(model).__name__}")
    return model


def first_batches(data: Any, size: int = SAMPLES) -> list[MicroBatch]:
    """Returns the first SAMPLES samples in evaluation batches of `size` samples."""
    batches = open_data(
        data,
        global_batch=SAMPLES,
        share=RankShare(0, 1, size),
        seed=0,
        drop_last=False,
        workers=0,
        prefetch=2,
        pin=False,
    )
    return list(islice(batches.evaluation(), SAMPLES // size))


def settle(case: Case) -> None:
    """Finds the model, data and task for a model, task or metric, as `trial_of`; raises Breach if none fit."""
    if case.kind in ("model", "task", "metric"):
        trial_of(case)


def trial_of(case: Case) -> ComponentTrial:
    """Returns the component with the author's model, data and task, else with the first of ddpforge's own that fit."""
    named = {key: case.settings[key] for key in ("model", "data", "task") if key in case.settings}
    needed = {"model", "data", "task"} - {case.kind}
    model = fresh(case) if case.kind == "model" else None
    choices = [{}] if needed <= named.keys() else fixtures.candidates(model)
    if case.kind in ("task", "metric"):
        case.build()  # reports wrong options of its own first

    failures: dict[str, tuple[str, Breach]] = {}  # keyed by the error
    for choice in choices:
        case.sections.update(choice | named)
        try:
            return _try(case)
        except _WrongLoss:
            raise  # it would fail with any choice
        except Exception as error:
            uses = ", ".join(f"{kind} {case.sections[kind]['use'].rpartition(':')[2]}" for kind in sorted(needed))
            found = blame(error, "", case.component)
            what = error.found if isinstance(error, Breach) else found.found
            failures.setdefault(what, (f"with {uses}: {what}", found))
    if len(choices) == 1:
        ((text, breach),) = failures.values()
        raise Breach(f"{case.kind} `{case.name}` to take a batch", text, where=breach.where)
    table = f"[{case.kind}.{case.name}]"
    missing = " and ".join(f'`{kind} = {{ use = "…", … }}`' for kind in sorted(needed - named.keys()))
    raise Breach(
        f"{case.kind} `{case.name}` to work with one of ddpforge's small models, data and tasks, or its author's own",
        "\n".join(text for text, _ in failures.values()),
        where=next(iter(failures.values()))[1].where,
        hints=[f"write {missing} below {table} in {case.said or 'ddpforge_testing.toml next to the component'}"],
    )


def _try(case: Case) -> ComponentTrial:
    model = fresh(case)
    data = case.companion("data", seed=0)
    task = case.build() if case.kind == "task" else case.companion("task")
    (first,) = first_batches(data)
    batch = first.data
    declared(task, model)
    task.check(model, data)
    alone = SingleRank()
    task.start(model, World(global_ranks=alone, dp_ranks=alone, device=alone.device, local_rank=0))
    updates = list(tasks_by_update(task).values())
    for one in updates:
        _, outputs = _pair(task, one.loss(model, batch))
    if case.kind == "metric":
        case.build()(outputs.detach(), batch[1])
    return ComponentTrial(model, data, updates, batch, first.samples)


class _WrongLoss(Breach):
    """Raised if a task's `loss` does not return a pair of loss and outputs."""


def _pair(task: Task, returned: Any) -> tuple[torch.Tensor, Any]:
    """Returns the loss and the outputs; raises _WrongLoss if `returned` is not such a pair."""
    items = tuple(returned) if isinstance(returned, tuple | list) else ()
    if len(items) == 2 and isinstance(items[0], torch.Tensor):
        return items
    found = f"({', '.join(f'a {type(item).__name__}' for item in items)})" if items else f"a {type(returned).__name__}"
    raise _WrongLoss(
        "`loss` to return a pair: the loss summed over the batch (a tensor), and the outputs for `metrics`",
        found,
        where=source_of(type(task).loss),
    )
