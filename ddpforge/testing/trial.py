"""A model, a batch and a task that fit together, around the component that is tested."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ddpforge.data import MicroBatch, RankShare, open_data
from ddpforge.data.nests import take
from ddpforge.interfaces import Task, World
from ddpforge.ranks.collectives import Alone
from ddpforge.testing import companions
from ddpforge.testing.cases import Case
from ddpforge.testing.report import Breach, blame, source_of
from ddpforge.training.beside import declared
from ddpforge.training.turns import of_turns

__all__ = ["SAMPLES", "Trial", "first_batches", "fresh", "settle", "trial_of"]

SAMPLES = 6  # a number with several divisors: batches are split


@dataclass(frozen=True)
class Trial:
    """Components that belong together; `batch` holds SAMPLES samples, or as many as the data has: `samples`.

    `turns` is the task as each of its turns sees it, or the task alone, and `task` the first of them.
    """

    model: nn.Module
    data: Any
    turns: list[Task]
    batch: Any
    samples: int

    def pieces(self, size: int) -> list[Any]:
        """The batch in pieces of so many samples, fetched anew where it cannot be cut."""
        try:
            return [take(self.batch, start, start + size, self.samples) for start in range(0, self.samples, size)]
        except ValueError:
            return [piece.data for piece in first_batches(self.data, size)]

    @property
    def task(self) -> Task:
        """The task, as its first turn sees it."""
        return self.turns[0]


def fresh(case: Case, seed: int = 0) -> nn.Module:
    """The model of a case with initial weights from `seed`."""
    torch.manual_seed(seed)
    model = case.build() if case.kind == "model" else case.companion("model")
    if not isinstance(model, nn.Module):
        raise Breach("a torch.nn.Module", f"a {type(model).__name__}")
    return model


def first_batches(data: Any, size: int = SAMPLES) -> list[MicroBatch]:
    """The first SAMPLES samples, in batches of evaluation of so many each."""
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
    """Finds what to try the component with, where its author left that open; raises Breach when nothing fits."""
    if case.kind in ("model", "task", "metric"):
        trial_of(case)


def trial_of(case: Case) -> Trial:
    """Finds what to try the component with: what its author names, else the first of ddpforge's own that it takes."""
    named = {key: case.settings[key] for key in ("model", "data", "task") if key in case.settings}
    needed = {"model", "data", "task"} - {case.kind}
    model = fresh(case) if case.kind == "model" else None
    choices = [{}] if needed <= named.keys() else companions.candidates(model)
    if case.kind in ("task", "metric"):
        case.build()  # its own options come first

    failures: dict[str, tuple[str, Breach]] = {}  # by what went wrong
    for choice in choices:
        case.sections.update(choice | named)
        try:
            return _try(case)
        except _WrongLoss:
            raise  # whatever it is tried with
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
        hints=[f"write {missing} below {table} in {case.said or 'ddpforge_testing.toml beside the component'}"],
    )


def _try(case: Case) -> Trial:
    model = fresh(case)
    data = case.companion("data", seed=0)
    task = case.build() if case.kind == "task" else case.companion("task")
    (first,) = first_batches(data)
    batch = first.data
    declared(task, model)
    task.check(model, data)
    alone = Alone()
    task.start(model, World(all=alone, data=alone, device=alone.device, local_rank=0))
    turns = list(of_turns(task).values())
    for one in turns:
        _, outputs = _pair(task, one.loss(model, batch))
    if case.kind == "metric":
        case.build()(outputs.detach(), batch[1])
    return Trial(model, data, turns, batch, first.samples)


class _WrongLoss(Breach):
    """A task's `loss` returns something else than a loss and outputs."""


def _pair(task: Task, returned: Any) -> tuple[torch.Tensor, Any]:
    """Returns the pair that `loss` returned; raises _WrongLoss if it is something else."""
    items = tuple(returned) if isinstance(returned, tuple | list) else ()
    if len(items) == 2 and isinstance(items[0], torch.Tensor):
        return items
    found = f"({', '.join(f'a {type(item).__name__}' for item in items)})" if items else f"a {type(returned).__name__}"
    raise _WrongLoss(
        "`loss` to return a pair: the loss summed over the batch, a tensor, and what `metrics` reads",
        found,
        where=source_of(type(task).loss),
    )
