"""What a step computes: forward and backward of its micro-batches, and the update. And what an evaluation does."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.data import MicroBatch, mix, seed_all, to_device
from ddpforge.errors import StrategyError
from ddpforge.firstlook import FirstLook
from ddpforge.interfaces import Exploring, Strategy, Task, Total, World
from ddpforge.statistics import Statistics

__all__ = ["Steps"]

_FORWARD, _EVALUATION = 0xF03A, 0xE7A1  # keep the random numbers of forward passes apart from those of the data


class Steps:
    """The steps of one rank, which gives what it returns to the ranks together: its totals, not means.

    Totals are the loss and, where they are measured, the task's metrics.
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
    ) -> None:
        self._world, self._strategy, self._task = world, strategy, task
        self._model, self._optimizer, self._statistics = model, optimizer, statistics
        self._seed = seed
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
        mine = torch.stack([torch.as_tensor(self._items(micro)) for micro in batches]).sum()
        return batches, self._strategy.total(mine)

    def _micro_step(self, step: int, micro: MicroBatch, items: Tensor | int, *, measure: bool) -> dict[str, Total]:
        seed_all(mix(self._seed, _FORWARD, step, micro.number, micro.shard), self._world.device)
        batch = to_device(micro.data, self._world.device)
        with self._strategy.micro_step(self._model, last=micro.last):
            with self._strategy.forward():
                loss, outputs = self._look.loss(self._model, batch, "training")
            # Every strategy takes the mean of the gradients over data ranks; this makes it that over the step's items.
            scale = self._world.data_size / (items.clamp(min=1) if isinstance(items, Tensor) else items)
            self._strategy.backward(loss * scale if micro.samples else loss * 0.0)
        return self._totals(micro, batch, loss, outputs, measure="training" if measure else None)

    def _explore(self, step: int, micro_batches: Iterable[MicroBatch], items: Tensor | int) -> Tensor:
        """The passes after the first, for an optimizer that makes several, and its update; see `Exploring`."""
        strategy, model, exploring = self._strategy, self._model, cast(Exploring, self._optimizer)
        buffers = [(buffer, buffer.clone()) for buffer in strategy.unwrap(model).buffers()]
        for _ in range(1, self._passes):
            norm = strategy.explore(model, exploring)
            if not math.isfinite(norm.item()):
                exploring.restore()
                break
            for micro in micro_batches:
                self._micro_step(step, micro, items, measure=False)
            for buffer, value in buffers:
                buffer.copy_(value)
        else:
            exploring.restore()
            norm = strategy.step(model, self._optimizer)
        if not math.isfinite(norm.item()):  # there was no update, after which forward passes would use what is restored
            strategy.weights(model, self._optimizer).changed()
        return norm

    # -- what comes of a micro-batch
    def _totals(self, micro: MicroBatch, batch: Any, loss: Tensor, outputs: Any, *, measure: str | None) -> dict[str, Total]:
        """What a micro-batch adds to sums and counts; a stand-in adds nothing, under the same names."""
        totals = {"loss": Total(loss.detach().clone(), self._items(micro))}  # CUDA graphs reuse their outputs
        if measure:
            with torch.no_grad():
                totals |= self._look.metrics(outputs, batch, measure)
        if micro.samples:
            return totals
        return {name: Total(torch.zeros_like(total.sum), 0) for name, total in totals.items()}

    def _items(self, micro: MicroBatch) -> Tensor | int:
        """How many items the micro-batch's loss sums over."""
        if not micro.samples:
            return 0
        counted = self._task.count(micro.data)
        return micro.samples if counted is None else counted


def _add(totals: dict[str, Total], more: Mapping[str, Total]) -> None:
    for name, total in more.items():
        before = totals.get(name)
        totals[name] = total if before is None else Total(before.sum + total.sum, before.count + total.count)
