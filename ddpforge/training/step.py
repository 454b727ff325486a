"""An optimizer step: forward and backward passes of its micro-batches, and one update of the weights."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ddpforge.components.local_code import component_name
from ddpforge.data import MicroBatch, mix, seed_all, to_device
from ddpforge.errors import PluginError, says_memory_is_full
from ddpforge.interfaces import Pass, Replica, SampleColumns, Task, Total, World
from ddpforge.ranks import heartbeat
from ddpforge.training.buffers import unchanged
from ddpforge.training.checkpoint_saver import CheckpointSaver
from ddpforge.training.checks import check_together
from ddpforge.training.features import Feature, methods_of
from ddpforge.training.task_checks import CheckedTask, check_whole, checked_quantity
from ddpforge.training.totals import add, exact, items_of, loss_total, suspended_autocast

__all__ = ["Stepper", "measure"]

_FORWARD = 0xF03A  # separates the seeds of forward passes from those of the data

_ForwardBackward = Callable[[], Any]


class _SummedItems(NamedTuple):
    """Items of a step that only the batches show, summed over all ranks."""

    total: Callable[[], Tensor]  # waits for the sum: 0-d, float64, on the device
    some: bool  # True if this rank has items, so that the sum is not zero


_Items = int | _SummedItems


class Stepper:
    """Computes the steps of one rank, and returns the rank's sums and counts, which the trainer reduces over ranks.

    Features that few runs use are separate objects, passed to the constructor.
    """

    def __init__(
        self,
        world: World,
        replica: Replica,
        task: Task,
        update: Callable[[_ForwardBackward], Tensor] | None = None,
        *,
        seed: int,
        stateful: nn.Module | None = None,
        features: Iterable[Feature] = (),
        first_checks: Iterable[Callable[[MicroBatch], None]] = (),
        saving: CheckpointSaver | None = None,
    ) -> None:
        """Prepares the steps of `replica` with the losses of `task`.

        Args:
            update: updates the weights. A multi-pass optimizer calls the argument of `update`, which computes new
                gradients of the same micro-batches. None is one `replica.step()`.
            stateful: the module that changes its buffers in forward passes; None is the model.
            features: their methods around passes are called, if they override them.
            first_checks: functions that are called once, with the very first micro-batch.
            saving: copies weights for a checkpoint; an update waits for it.
        """
        self._world, self._replica = world, replica
        self._stateful = replica.unwrapped if stateful is None else stateful
        self._update = update
        self._before_pass, self._after_passes, self._pass_totals = (
            methods_of(features, method) for method in ("before_pass", "after_passes", "pass_totals")
        )
        self._task = CheckedTask(task, "training", None if self._pass_totals else _compiled_loss(task, replica))
        self._seed, self._first_checks, self._saving = seed, list(first_checks), saving
        self.counts = False  # whether the task counts items that are not samples; known after the first step
        self._empty: Tensor | float = 0.0
        self._ranks = torch.tensor(float(world.dp_ranks.size), dtype=torch.float64)

    def train_step(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int = 0
    ) -> tuple[dict[str, Total], Tensor]:
        """Takes one optimizer step on `micro_batches`, which begin with `first`.

        Returns the totals of the loss and, with `measure`, of the task's metrics; and the norm (0-d, on the device) of
        the reduced gradient. If a step has several updates, `update` numbers them: each has seeds of its own.
        """
        while self._first_checks:
            self._first_checks.pop(0)(first)
        micro_batches, items = self.count_items(first, micro_batches)
        if self._update:  # which may use them again
            micro_batches = list(micro_batches)
        totals = self.forward_backward(step, update, micro_batches, items, measure=measure)
        if not isinstance(items, int) and not items.some:
            self._empty = self._empty + (items.total() <= 0)  # on the device of the number: nothing waits for it
        heartbeat.beat(heartbeat.STEP)
        if self._saving and self._saving.copying:
            self._saving.before_update()
        if self._update is None:
            return totals, self._replica.step()
        again = partial(self.forward_backward, step, update, micro_batches, items, measure=False)
        return totals, self._update(again)

    def count_items(
        self, first: MicroBatch, micro_batches: Iterable[MicroBatch]
    ) -> tuple[Iterable[MicroBatch], _Items]:
        """Returns the step's micro-batches, and the number of their items on all ranks together.

        The number of samples is known in advance. Items that only the batches show (tokens) are summed over ranks while
        the first forward pass runs.
        """
        task = self._task.task
        if task.count(first.data) is None:
            return micro_batches, first.step_samples
        self.counts = True
        batches = [micro._replace(items=items_of(task, micro)) for micro in micro_batches]
        mine = torch.as_tensor(sum(torch.as_tensor(micro.items, dtype=torch.float64) for micro in batches))
        on_host = mine.device.type == "cpu"
        if on_host and not 0 <= mine.item() < math.inf:
            raise PluginError(
                f"{component_name(task)}.count returned {mine.item():g} for a step",
                hints=["return the number of items that the loss sums over, or the sum of their weights: 0 or more"],
            )
        some = on_host and mine.item() > 0
        return batches, _SummedItems(cache(self._world.dp_ranks.all_reduce_sum_async(mine)), some)

    def forward_backward(
        self, step: int, update: int, micro_batches: Iterable[MicroBatch], items: _Items, *, measure: bool
    ) -> dict[str, Total]:
        """Runs all forward and backward passes of a step, in the replica's order; returns this rank's totals."""
        totals: dict[str, Total] = {}
        running: deque[MicroBatch] = deque()

        def passes() -> Iterator[Pass]:
            for micro in micro_batches:
                if self._task.task.whole_batch:
                    check_whole(self._task.task, micro)
                for enter in self._before_pass:
                    enter(micro)
                place = (step, micro.number, micro.shard, *([update] if update else []))
                running.append(micro)
                yield Pass(
                    batch=self._replica.local_batch(to_device(micro.data, self._world.device)),
                    samples=micro.samples or None,
                    seed=partial(seed_all, mix(self._seed, _FORWARD, *place), self._world.device),
                    scale=partial(self._scale, items) if micro.samples else lambda: 0.0,
                    last=micro.last,
                    needs_outputs=measure and micro.samples > 0,
                    # Padding samples are not data: statistics must not count them.
                    context=nullcontext if micro.samples else partial(unchanged, self._stateful),
                    totals=[total for one in self._pass_totals if (total := one(micro))] if measure else (),
                )

        for result in self._replica.run_microbatches(passes(), self.compute, trains=True):
            micro = running.popleft()
            if result is not None:  # otherwise another rank has the loss, and counts it
                loss, measured = result
                counted = items_of(self._task.task, micro) if self.counts else micro.samples
                add(totals, {"loss": loss_total(loss, counted), **(measured or {})})
        for leave in self._after_passes:
            leave()
        return totals

    def compute(self, module: nn.Module, one: Pass) -> tuple[Tensor, dict[str, Total]]:
        """Returns the summed loss of a pass and, if they are measured, the totals of its metrics."""
        # Outputs are not returned: if the backward pass kept them, they would be a tenth of a language model's peak
        # memory.
        heartbeat.beat(heartbeat.FORWARD)
        one.seed()
        self._task.task.batch_samples = one.samples
        try:
            loss, outputs = self._task.loss(module, one.batch)
        except Exception as error:
            check_together("failed_pass", error, module, one.batch, "data.train")
            raise
        found = measure(self._task, outputs, one.batch) if one.needs_outputs else {}
        # Without the rows, because gathering them would slow training down.
        measured = {name: quantity for name, quantity in found.items() if isinstance(quantity, Total)}
        for further in one.totals:
            measured |= further(loss.detach(), outputs, one.batch)
        heartbeat.beat(heartbeat.BACKWARD)
        if one.last:
            heartbeat.finish_forward()
        return loss, measured

    def _scale(self, items: _Items) -> Tensor | float:
        """Returns the factor from the mean of gradients over data-parallel ranks to the mean over the step's items."""
        if isinstance(items, int):
            return self._world.dp_ranks.size / items
        total = items.total()
        if not items.some:
            total = torch.maximum(total, total <= 0)  # without items the gradient is zero, not 0 / 0
        return torch.div(self._ranks, total).float()  # of a Python number it were a reciprocal and a product

    def take_empty(self) -> Tensor | float:
        """Returns the number of updates without an item on any rank since the last call (0-d, on the device)."""
        empty, self._empty = self._empty, 0.0
        return empty


def _compiled_loss(task: Task, replica: Replica) -> Callable[[nn.Module, Any], tuple[Tensor, None]] | None:
    """Returns the task's loss in one graph with the model, without outputs; None if they are used, or not compiled.

    A graph that does not return the logits can write their gradient into their memory.
    """
    if not task.compiles or getattr(task.metrics, "__func__", None) is not Task.metrics:
        return None
    compiled = replica.compile_loss(lambda module, batch: task.loss(module, batch)[0])
    if compiled is None:
        return None

    def loss(module: nn.Module, batch: Any) -> tuple[Tensor, None]:
        try:
            return compiled(module, batch), None
        except (IndexError, RuntimeError, ValueError) as error:
            if not says_memory_is_full(error):
                with torch.compiler.set_stance("force_eager"):
                    task.loss(module, batch)  # its own error names the values that do not fit
            raise

    return loss


def measure(task: CheckedTask, outputs: Any, batch: Any) -> dict[str, Total | SampleColumns]:
    """Returns the task's metrics of a batch, computed without gradients and in the dtype of the outputs."""
    with torch.no_grad(), suspended_autocast():
        found = task.metrics(outputs, batch)
    for name, quantity in found.items():
        checked_quantity(name, quantity)  # a later batch may give another form
    return {name: exact(quantity) for name, quantity in found.items()}
