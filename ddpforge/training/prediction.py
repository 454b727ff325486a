"""Predicts samples: forward passes over a dataset, and the task's prediction of each sample, in the data's order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ddpforge.data import Batches, MicroBatch
from ddpforge.errors import PluginError, UsageError, described
from ddpforge.interfaces import Pass, ShardedDataset, Task, World
from ddpforge.training.alternating_updates import component_name
from ddpforge.training.evaluation import Evaluator

__all__ = ["INDEX", "NAMED", "Predicted", "check_single_update", "in_order", "predictions", "with_names"]

NAMED = {"class", "labels", "target"}  # columns that may hold class numbers
INDEX = "index"  # the column with the place of a sample in its dataset
_HINT = "return columns by name, each with one value for every sample: {'class': logits.argmax(1)}"
_OWN = "write `predict(self, model, batch)` in the task"


@dataclass(frozen=True)
class Predicted:
    """Predictions of consecutive samples; `first` is the place of the first sample in the data."""

    first: int
    samples: int
    columns: Mapping[str, NDArray[Any] | list[Any]]

    def up_to(self, limit: int | None) -> Predicted:
        """Returns the predictions that are of the first `limit` samples of the data."""
        if limit is None or self.first + self.samples <= limit:
            return self
        count = max(0, limit - self.first)
        return Predicted(self.first, count, {name: column[:count] for name, column in self.columns.items()})


def check_single_update(task: Task) -> None:
    """Raises UsageError for a task with updates that has no `predict` of its own."""
    if task.updates and type(task).predict is Task.predict:
        raise UsageError(
            f"{component_name(task)} makes several updates a step, and has no `predict` of its own",
            hints=[_OWN, "or call the model yourself, in Python: `ddpforge.load(RUN).model()`"],
        )


def in_order(data: Any) -> Any:
    """Returns the dataset for reading from first to last sample; a dataset in parts is read at one place at a time."""
    if not isinstance(data, ShardedDataset):
        return data
    data = copy(data)
    data.shuffle, data.shuffle_buffer, data.interleave = False, 1, (1, 1)
    return data


def predictions(
    evaluator: Evaluator,
    task: Task,
    batches: Batches,
    world: World,
    *,
    limit: int | None = None,
    names: Sequence[str] = (),
) -> Iterator[list[Predicted]]:
    """Yields on every rank, step by step, the predictions of all ranks: each sample once, in the order of the data.

    Collective; memory holds one step. With `limit`, it stops after the first `limit` samples. `names` are those of the
    classes; each column of class numbers then has one of names after it. Raises UsageError under a strategy that cuts
    samples, PluginError if the columns of a task do not match its samples.
    """
    if evaluator.is_cut:
        raise UsageError(
            "the strategy splits the positions of every sample over ranks, and a prediction needs a whole sample",
            hints=["change the recipe for this command with KEY=VALUE: strategy.context=1, or strategy.use=single"],
        )

    def compute(model: nn.Module, one: Pass) -> tuple[Tensor, Any]:
        one.seed()
        return torch.zeros(()), task.predict(model, one.batch)

    mine: list[Predicted] = []
    begin = 0
    with evaluator.evaluating():
        for micro, _, result in evaluator.results(_first(batches.evaluation(), limit), compute):
            if result is not None and micro.samples:
                mine.append(_taken(task, micro, result[1], names))
            if micro.last:
                found = _in_order(
                    chain.from_iterable(world.global_ranks.all_gather_object(mine)), begin, micro.step_samples
                )
                yield [part.up_to(limit) for part in found]
                begin, mine = begin + micro.step_samples, []


def _first(micro_batches: Iterable[MicroBatch], limit: int | None) -> Iterator[MicroBatch]:
    """Yields whole steps until they have `limit` samples; the same steps on all ranks."""
    taken = 0
    for micro in micro_batches:
        yield micro
        taken += micro.step_samples if micro.last else 0
        if limit is not None and taken >= limit:
            return


def _in_order(parts: Iterable[Predicted], begin: int, samples: int) -> list[Predicted]:
    """Returns the parts of a step in order, each once: ranks that share a model have the same parts.

    Raises PluginError unless the parts are the whole step.
    """
    found = sorted({part.first: part for part in parts}.values(), key=lambda part: part.first)
    for part in found:
        if part.first != begin:
            break
        begin, samples = begin + part.samples, samples - part.samples
    if samples:
        raise PluginError(
            f"{samples} samples of the step were not predicted, or not in the order of the data",
            hints=["this is a bug in the dataset or in the strategy"],
        )
    return found


# ---------------------------------------------------------------------------------------------- the task's columns
def _taken(task: Task, micro: MicroBatch, returned: Any, names: Sequence[str]) -> Predicted:
    """Returns the prediction of a micro-batch on the CPU; raises PluginError for invalid columns."""
    where = f"{component_name(task)}.predict"
    if not isinstance(returned, Mapping) or not returned or not all(isinstance(name, str) for name in returned):
        raise PluginError(f"{where} returns {described(returned)}, not columns by name", hints=[_HINT, _OWN])
    if INDEX in returned:
        raise PluginError(f"{where} returns a column `{INDEX}`, a name that is reserved", hints=["rename it"])
    columns = {name: _column(f"{where}: `{name}`", value, micro.samples) for name, value in returned.items()}
    assert micro.places is not None  # as in every evaluation
    return Predicted(int(micro.places[0]), micro.samples, with_names(columns, names) if names else columns)


def with_names(
    columns: Mapping[str, NDArray[Any] | list[Any]], names: Sequence[str]
) -> dict[str, NDArray[Any] | list[Any]]:
    """Returns the columns, with a column `X_name` after each column `X` of `NAMED` that holds class numbers."""
    found: dict[str, NDArray[Any] | list[Any]] = {}
    for key, column in columns.items():
        found[key] = column
        name = f"{key}_name"
        if key in NAMED and not NAMED.isdisjoint(columns.keys() - {"target"}) and name not in columns:
            found |= {name: named} if (named := _named(column, names)) is not None else {}
    return found


def _named(column: NDArray[Any] | list[Any], names: Sequence[str]) -> list[Any] | None:
    """Returns the name of each class number, and "" for a number without a name; None for other columns."""
    if isinstance(column, list):
        inner = [_named(one, names) for one in column if isinstance(one, np.ndarray)]
        return inner if len(inner) == len(column) and None not in inner else None
    if column.ndim != 1 or column.dtype.kind not in "iu":
        return None
    return [names[number] if 0 <= number < len(names) else "" for number in column.tolist()]


def _column(name: str, value: Any, samples: int) -> NDArray[Any] | list[Any]:
    """Returns a column with a row for each sample; raises PluginError if the number of rows is another."""
    if isinstance(value, Tensor | np.ndarray) and value.ndim and len(value) == samples:
        found: NDArray[Any] = _plain(value)
        return found
    if isinstance(value, list | tuple) and len(value) == samples:
        return [_plain(one) for one in value]
    raise PluginError(f"{name} is {described(value)}, but there are {samples} samples", hints=[_HINT, _OWN])


def _plain(value: Any) -> Any:
    """Returns a tensor as an array on the CPU, and any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor):
        value = value.full_tensor()
    value = value.detach().cpu()
    return (value.float() if value.dtype in (torch.bfloat16, torch.float16) else value).numpy()
