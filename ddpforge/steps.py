"""What a step computes: forward and backward of its micro-batches, and the update. And what an evaluation does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.data import MicroBatch, mix, seed_all, to_device
from ddpforge.errors import PluginError, StrategyError
from ddpforge.firstlook import FirstLook, checked_total
from ddpforge.interfaces import Exploring, Strategy, Task, Total, World
from ddpforge.statistics import Buffers, Statistics, unchanged
from ddpforge.sums import refuse_mean

__all__ = ["Steps"]

_FORWARD, _EVALUATION = 0xF03A, 0xE7A1  # keep the random numbers of forward passes apart from those of the data


class Steps:
    """The steps of one rank, which gives what it returns to the ranks together: its totals, not means.

    Totals are the loss and, where they are measured, the task's metrics. `skips` says that training goes on after a
    step whose gradient is not finite: such a step leaves buffers as they were, too. `compares` has the first loss of
    all compared with those of its halves: a mean for a sum is refused.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        task: Task,
        model: nn.Module,
        optimizer: Optimizer,
        statistics: Statistics,
        *,
        seed: int,
        skips: bool,
        compares: bool = False,
    ) -> None:
        self._world, self._strategy, self._task = world, strategy, task
        self._model, self._optimizer, self._statistics = model, optimizer, statistics
        self._bare = strategy.unwrap(model)
        self._seed, self._skips, self._compares = seed, skips, compares
        self._look = FirstLook(task)
        self._passes: int = getattr(optimizer, "passes", 1)
        if self._passes > 1 and type(strategy).explore is Strategy.explore:
            raise StrategyError(
                f"{type(optimizer).__name__} makes {self._passes} passes per step, and {type(strategy).__name__} is "
                "for optimizers that make one",
                hints=["use another optimizer or another strategy"],
            )

    def train(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool
    ) -> tuple[dict[str, Total], Tensor]:
        """One optimizer step on `micro_batches`, of which `first` is one; also returns the gradient's norm (0-d)."""
        before = Buffers(self._bare) if self._skips else None
        totals, norm = self._train(step, first, micro_batches, measure=measure)
        if before:
            before.restore_unless(torch.isfinite(norm))
        return totals, norm

    def _train(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool
    ) -> tuple[dict[str, Total], Tensor]:
        micro_batches, items = self._count(first, micro_batches)
        if self._passes > 1:
            micro_batches = list(micro_batches)
        totals: dict[str, Total] = {}
        for micro in micro_batches:
            self._statistics.enter(micro.shard)
            _add(totals, self._micro_step(step, micro, items, measure=measure))
        self._statistics.leave()
        if self._passes > 1:
            return totals, self._explore(step, micro_batches, items)
        return totals, self._strategy.step(self._model, self._optimizer)

    def evaluate(self, micro_batches: Iterable[MicroBatch]) -> dict[str, Total]:
        """Forward passes without an update; stand-ins that fill up a last batch count nothing."""
        totals: dict[str, Total] = {}
        for number, micro in enumerate(micro_batches):
            seed_all(mix(self._seed, _EVALUATION, number, self._world.data_rank), self._world.device)
            batch = to_device(micro.data, self._world.device)
            with self._strategy.forward():
                loss, outputs = self._look.loss(self._model, batch, "evaluation")
            _add(totals, self._totals(micro, batch, loss, outputs, measure="evaluation"))
        return totals

    # -- one step
    def _count(
        self, first: MicroBatch, micro_batches: Iterable[MicroBatch]
    ) -> tuple[Iterable[MicroBatch], Tensor | int]:
        """The step's micro-batches, and how many items they have on all ranks together.

        How many samples a step has is arithmetic; items that only the batches know (tokens) are counted on all ranks
        while the first forward pass runs.
        """
        if self._task.count(first.data) is None:
            return micro_batches, first.step_samples
        batches = list(micro_batches)
        mine = torch.stack([torch.as_tensor(self._items(micro), dtype=torch.float64) for micro in batches]).sum()
        if mine.device.type == "cpu" and not 0 <= mine < math.inf:
            raise PluginError(
                f"{type(self._task).__name__}.count gave {mine.item():g} for a step",
                hints=["count how many items the loss sums over, or add up their weights: 0 or more"],
            )
        return batches, self._strategy.total(mine)

    def _micro_step(self, step: int, micro: MicroBatch, items: Tensor | int, *, measure: bool) -> dict[str, Total]:
        batch = to_device(micro.data, self._world.device)
        if self._compares and step == 1:
            self._compares = False
            with self._strategy.forward(), unchanged(self._bare):  # a copy's forward may be bound to the model's own
                refuse_mean(self._bare, self._task, batch)
        seed_all(mix(self._seed, _FORWARD, step, micro.number, micro.shard), self._world.device)
        with ExitStack() as stack:
            if not micro.samples:
                stack.enter_context(unchanged(self._bare))  # a stand-in is no data: statistics must not count it
            stack.enter_context(self._strategy.micro_step(self._model, last=micro.last))
            with self._strategy.forward():
                loss, outputs = self._look.loss(self._model, batch, "training")
            self._strategy.backward(loss * (self._scale(items) if micro.samples else 0.0))
        return self._totals(micro, batch, loss, outputs, measure="training" if measure else None)

    def _scale(self, items: Tensor | int) -> Tensor | float:
        """What makes the mean of gradients over data ranks, which every strategy takes, that over the step's items."""
        if not isinstance(items, Tensor):
            return self._world.data_size / items
        counted = torch.where(items > 0, items, 1.0)  # of a step without items the gradient is zero, not 0 / 0
        return (self._world.data_size / counted).float()

    def _explore(self, step: int, micro_batches: Iterable[MicroBatch], items: Tensor | int) -> Tensor:
        """The passes after the first, for an optimizer that makes several, and its update; see `Exploring`."""
        strategy, model, exploring = self._strategy, self._model, cast(Exploring, self._optimizer)
        for _ in range(1, self._passes):
            norm = strategy.explore(model, exploring)
            if not math.isfinite(norm.item()):
                exploring.restore()
                break
            with unchanged(self._bare):
                for micro in micro_batches:
                    self._micro_step(step, micro, items, measure=False)
        else:
            exploring.restore()
            norm = strategy.step(model, self._optimizer)
        if not math.isfinite(norm.item()):  # there was no update, after which forward passes would use what is restored
            strategy.weights(model, self._optimizer).changed()
        return norm

    # -- what comes of a micro-batch
    def _totals(
        self, micro: MicroBatch, batch: Any, loss: Tensor, outputs: Any, *, measure: str | None
    ) -> dict[str, Total]:
        """What a micro-batch adds to sums and counts; a stand-in adds nothing, under the same names."""
        totals = {"loss": Total(loss.detach(), self._items(micro))}
        if measure:
            with torch.no_grad():
                totals |= self._look.metrics(outputs, batch, measure)
        if micro.samples:
            return {name: _exact(name, total) for name, total in totals.items()}
        return {name: Total(torch.zeros((), dtype=torch.float64), 0) for name in totals}

    def _items(self, micro: MicroBatch) -> Tensor | int:
        """How many items the micro-batch's loss sums over."""
        if not micro.samples:
            return 0
        counted = self._task.count(micro.data)
        return micro.samples if counted is None else counted


def _exact(name: str, total: Total) -> Total:
    """A copy in float64, for adding up: 256 + 1 is 256 in bfloat16. CUDA graphs reuse their outputs, copies stay."""
    checked_total(name, total)
    count = total.count.detach().double() if isinstance(total.count, Tensor) else total.count
    return Total(total.sum.detach().to(torch.float64, copy=True), count)


def _add(totals: dict[str, Total], more: Mapping[str, Total]) -> None:
    for name, total in more.items():
        before = totals.get(name)
        totals[name] = total if before is None else Total(before.sum + total.sum, before.count + total.count)
