"""Losses of the sources of a mixture, from the outputs of the step's own forward passes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from ddpforge.components.local_code import component_name
from ddpforge.data import MicroBatch
from ddpforge.data.pytree import select
from ddpforge.features.mixture import MixtureSampler
from ddpforge.interfaces import Task, Total
from ddpforge.training.contract import contract_of
from ddpforge.training.features import Assembled, Feature, PassTotals
from ddpforge.training.stages import Dealt
from ddpforge.training.totals import items_of, loss_total, suspended_autocast
from ddpforge.training.updates import update_names

__all__ = ["SamplesOfSource", "SourceLosses", "has_loss_from_outputs", "source_losses"]

log = logging.getLogger("ddpforge")

_CLOSE = 0.01  # the loss may have been computed in bfloat16


class SamplesOfSource(NamedTuple):
    """Samples of one source in a batch: their places, and the number of items that their loss sums over."""

    rows: Sequence[int]
    items: Tensor | int


class SourceLosses(Feature):
    """Sums and counts of the loss of each source, which ranks add up and divide once."""

    @classmethod
    def of(cls, run: Assembled) -> SourceLosses | None:
        """Returns the feature if the losses of the recipe's sources can be computed."""
        return source_losses(run.parts) if run.trains else None

    @override
    def pass_totals(self, micro: MicroBatch) -> PassTotals | None:
        samples = self.samples(micro)
        return partial(self.totals_of, samples) if samples else None

    def __init__(
        self, task: Task, names: Sequence[str], source_of: Callable[[Any], NDArray[Any]], *, compiled: bool
    ) -> None:
        """Prepares for the sources `names`.

        `source_of` returns the number of the source of each place in the data; `compiled`: the task's loss is compiled.
        """
        self._task, self._names, self._source_of, self._compiled = task, names, source_of, compiled
        self._is_checked = False

    def samples(self, micro: MicroBatch) -> dict[str, SamplesOfSource]:
        """Returns the places of each source's samples in a micro-batch, and their items; empty for a padding batch."""
        if micro.places is None or not micro.samples:
            return {}
        found, sources = {}, self._source_of(micro.places)
        for number, name in enumerate(self._names):
            rows = np.flatnonzero(sources == number).tolist()
            if not rows:
                continue
            try:
                part = micro._replace(data=select(micro.data, rows, micro.samples), samples=len(rows), items=None)
            except ValueError as error:
                self._give_up(str(error))
                return {}
            found[name] = SamplesOfSource(rows, items_of(self._task, part))
        return found

    def totals_of(
        self, samples: Mapping[str, SamplesOfSource], loss: Tensor, outputs: Any, batch: Any
    ) -> dict[str, Total]:
        """Returns the total of each source's loss in a batch, as the metric "NAME/loss".

        Returns none if they do not add up to `loss`, the loss of the batch: it cannot be cut into samples.
        """
        size, found = sum(len(one.rows) for one in samples.values()), {}
        # Batches of a source differ in size, and each size would be compiled.
        eager: AbstractContextManager[Any] = (
            torch.compiler.set_stance("force_eager") if self._compiled else nullcontext()
        )
        with torch.no_grad(), suspended_autocast(), eager:
            for name, (rows, items) in samples.items():
                of_source = self._task.loss_from_outputs(select(outputs, rows, size), select(batch, rows, size))
                found[f"{name}/loss"] = loss_total(of_source, items)
        if not self._is_checked:  # once, because it waits for the device
            self._is_checked, total = True, sum(one.sum.item() for one in found.values())
            if not math.isclose(total, loss.item(), rel_tol=_CLOSE, abs_tol=_CLOSE):
                self._give_up(f"they add up to {total:.6g}, but the loss of the batch is {loss.item():.6g}")
                return {}
        return found

    def _give_up(self, why: str) -> None:
        self._names = ()
        log.warning("training reports no losses of single sources: %s", why)


def source_losses(parts: Dealt) -> SourceLosses | None:
    """Returns the losses of the recipe's sources; None, and a message in the log, if they cannot be computed."""
    order = parts.sampler
    if not isinstance(order, MixtureSampler) or not parts.trains:
        return None
    why = _unknown(parts)
    if why:
        log.info("training reports no losses of single sources: %s", why)
        return None
    source_of = parts.data["train"].source_of
    return SourceLosses(parts.task, order.names, source_of, compiled=parts.recipe.train.compile != "off")


def _unknown(parts: Dealt) -> str:
    """Returns the reason why the loss of some samples of a batch is not known; empty if it is known."""
    task = parts.task
    if update_names(task):
        return f"{component_name(task)} makes several updates in a step"
    if task.whole_batch:
        return f"the loss of {component_name(task)} compares samples"
    if not has_loss_from_outputs(type(task)) or task.loss_in_model:
        return f"{component_name(task)} has no `loss_from_outputs`"
    if contract_of(parts.strategy).splits_forward:
        return f'strategy.use = "{parts.recipe.strategy.use}" splits forward passes over ranks here'
    return ""


def has_loss_from_outputs(task: type) -> bool:
    """True if no class overrides `loss` without `loss_from_outputs`, so that both are of the same loss.

    False for one of several updates, which is not a task by itself.
    """
    if not issubclass(task, Task):
        return False
    order = task.__mro__
    first = {name: next(place for place, one in enumerate(order) if name in vars(one)) for name in _BOTH}
    return order[first["loss_from_outputs"]] is not Task and first["loss_from_outputs"] <= first["loss"]


_BOTH = ("loss", "loss_from_outputs")
