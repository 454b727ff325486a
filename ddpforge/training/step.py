"""Computes a step, or one of its turns: forward and backward of its micro-batches, and the update."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.data import MicroBatch, mix, seed_all, to_device
from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import Explores, Exploring, Pass, Replica, Task, Total, World
from ddpforge.ranks import phases
from ddpforge.training.batchnorm import BatchNormAverager, Buffers, unchanged
from ddpforge.training.first_look import name_of
from ddpforge.training.sums import refuse_mean
from ddpforge.training.totals import Meter, add
from ddpforge.training.whole_batch import check_whole

__all__ = ["Stepper"]

_Items = int | Callable[[], Tensor]  # of a step: a number, or what waits until ranks have counted

_FORWARD = 0xF03A  # keeps the random numbers of forward passes apart from those of the data


class Stepper:
    """Runs one rank's optimizer steps; returns this rank's sums and counts, which the trainer reduces over ranks.

    Totals are the loss and, where they are measured, the task's metrics. `stateful` has the buffers that forward passes
    change, by default the model. `skips` says that training goes on after a step whose gradient is not finite: such a
    step leaves buffers as they were, too. `compares` has the first loss of all compared with those of its halves: a
    mean for a sum is refused. `before_first` is called with the first micro-batch of all, `before_update` before the
    weights change.
    """

    def __init__(
        self,
        world: World,
        replica: Replica,
        task: Task,
        optimizer: Optimizer,
        statistics: BatchNormAverager,
        *,
        seed: int,
        skips: bool,
        compares: bool = False,
        stateful: nn.Module | None = None,
        before_first: Callable[[MicroBatch], None] | None = None,
        before_update: Callable[[], None] = lambda: None,
    ) -> None:
        self._world, self._replica, self._task = world, replica, task
        self._optimizer, self._statistics = optimizer, statistics
        self._stateful = replica.bare if stateful is None else stateful
        self._seed, self._skips, self._compares, self._update = seed, skips, compares, 0
        self._meter, self._before_update = Meter(task, "training"), before_update
        self._before_first = before_first  # None once it was called
        self._passes: int = getattr(optimizer, "passes", 1)
        self.counts = False  # whether the task counts items that are not samples; known after the first step
        self._empty: Tensor | float = 0.0
        if self._passes > 1 and not isinstance(replica, Explores):
            raise StrategyError(
                f"{type(optimizer).__name__} makes {self._passes} passes per step, and the strategy is for optimizers "
                "that make one",
                hints=["use another optimizer or another strategy"],
            )

    def train(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int = 0
    ) -> tuple[dict[str, Total], Tensor]:
        """One optimizer step on `micro_batches`, of which `first` is one; also returns the gradient's norm (0-d).

        Where a step has several updates, `update` counts them: each draws random numbers of its own.
        """
        self._update = update
        before = Buffers(self._stateful) if self._skips else None
        totals, norm = self._train(step, first, micro_batches, measure=measure)
        if before:
            before.restore_unless(torch.isfinite(norm))
        return totals, norm

    def _train(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool
    ) -> tuple[dict[str, Total], Tensor]:
        if self._before_first:
            before_first, self._before_first = self._before_first, None
            before_first(first)
        micro_batches, items = self._count(first, micro_batches)
        if self._passes > 1:
            micro_batches = list(micro_batches)
        totals = self._forward_backward(step, micro_batches, items, measure=measure)
        if not isinstance(items, int):
            self._empty = self._empty + (items() <= 0)  # on the device: nothing waits for it
        self._statistics.leave()
        phases.mark(phases.STEP)
        self._before_update()
        if self._passes > 1:
            return totals, self._explore(step, cast(list[MicroBatch], micro_batches), items)
        return totals, self._replica.step()

    def take_empty(self) -> Tensor | float:
        """Returns how many steps had no item on any rank since this was last called (0-d, on the device)."""
        empty, self._empty = self._empty, 0.0
        return empty

    # -- one step
    def _count(self, first: MicroBatch, micro_batches: Iterable[MicroBatch]) -> tuple[Iterable[MicroBatch], _Items]:
        """The step's micro-batches, and how many items they have on all ranks together.

        How many samples a step has is arithmetic; items that only the batches know (tokens) are counted on all ranks
        while the first forward pass runs.
        """
        if self._task.count(first.data) is None:
            return micro_batches, first.step_samples
        self.counts = True
        batches = [micro._replace(items=self._meter.items(micro)) for micro in micro_batches]
        mine = torch.as_tensor(sum(torch.as_tensor(micro.items, dtype=torch.float64) for micro in batches))
        if mine.device.type == "cpu" and not 0 <= mine.item() < math.inf:
            raise PluginError(
                f"{name_of(self._task)}.count gave {mine.item():g} for a step",
                hints=["count how many items the loss sums over, or add up their weights: 0 or more"],
            )
        return batches, cache(self._world.data.begin_sum(mine))

    def _forward_backward(
        self, step: int, micro_batches: Iterable[MicroBatch], items: _Items, *, measure: bool
    ) -> dict[str, Total]:
        """All passes of a step, in the replica's order; this rank's totals."""
        found: dict[str, Total] = {}
        running: deque[MicroBatch] = deque()

        def passes() -> Iterator[Pass]:
            for micro in micro_batches:
                batch = self._replica.own_part(to_device(micro.data, self._world.device))
                running.append(micro)
                yield self._pass(step, micro, batch, items, measure)

        for result in self._replica.passes(passes(), self._compute, trains=True):
            add(found, self._meter.totals(running.popleft(), result))
        return found

    def _compute(self, module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
        phases.mark(phases.FORWARD)
        loss, outputs = self._meter.compute(module, one)
        # Outputs that are kept through the backward pass are a tenth of a language model's peak memory.
        measured = self._meter.measure(outputs, one.batch) if one.measured else {}
        phases.mark(phases.BACKWARD)
        return loss, measured

    def _pass(self, step: int, micro: MicroBatch, batch: Any, items: _Items, measured: bool) -> Pass:
        check_whole(self._task, micro)
        self._statistics.enter(micro.shard)
        if self._compares and step == 1:
            self._compares = False
            with self._replica.forward(), unchanged(self._stateful):  # a copy's forward may be bound to the model
                refuse_mean(self._replica.bare, self._task, batch, micro.samples)
        return Pass(
            batch=batch,
            seed=partial(seed_all, mix(self._seed, _FORWARD, *self._numbers(step, micro)), self._world.device),
            scale=partial(self._scale, items) if micro.samples else lambda: 0.0,
            last=micro.last,
            measured=measured and micro.samples > 0,
            # A stand-in is no data: statistics must not count it.
            around=nullcontext if micro.samples else partial(unchanged, self._stateful),
        )

    def _numbers(self, step: int, micro: MicroBatch) -> tuple[int, ...]:
        """The numbers that those drawn in a pass depend on."""
        place = (step, micro.number, micro.shard)
        return (*place, self._update) if self._update else place

    def _scale(self, items: _Items) -> Tensor | float:
        """The factor that turns a strategy's mean of gradients over data ranks into the mean over the step's items."""
        if isinstance(items, int):
            return self._world.data.size / items
        total = items()
        counted = torch.where(total > 0, total, 1.0)  # of a step without items the gradient is zero, not 0 / 0
        return (self._world.data.size / counted).float()

    def _explore(self, step: int, micro_batches: list[MicroBatch], items: _Items) -> Tensor:
        """The passes after the first, for an optimizer that makes several, and its update; see `Exploring`."""
        replica, exploring = cast(Explores, self._replica), cast(Exploring, self._optimizer)
        for _ in range(1, self._passes):
            norm = replica.explore(exploring)
            if not math.isfinite(norm.item()):
                exploring.restore()
                break
            with unchanged(self._stateful):
                self._forward_backward(step, micro_batches, items, measure=False)
        else:
            exploring.restore()
            norm = self._replica.step()
        if not math.isfinite(norm.item()):  # there was no update, after which forward passes would use what is restored
            self._replica.weights.changed()
        return norm
