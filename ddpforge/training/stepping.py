"""Steps of one rank: learning rates, global batches, and the steppers of the task's updates."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from ddpforge.data import MicroBatch
from ddpforge.errors import Diverged
from ddpforge.interfaces import Total
from ddpforge.ranks import heartbeat
from ddpforge.ranks.signals import waiting_for_data
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer
from ddpforge.training.callback_calls import CallbackCalls
from ddpforge.training.checkpoint_saver import CheckpointSaver
from ddpforge.training.checks import FirstStepCheck, check_together
from ddpforge.training.features import Assembled, Feature, GlobalBatch, TakesSteps, methods_of, only_one
from ddpforge.training.learning_rates import Rates
from ddpforge.training.media import MediaLogger
from ddpforge.training.nonfinite import GradientNorms
from ddpforge.training.progress import Progress
from ddpforge.training.step import Stepper
from ddpforge.training.updates import batches_per_step, tasks_by_update

__all__ = ["Stepping"]


class Stepping:
    """Takes the steps of a run on one rank. A step is one optimizer step, or the alternating updates of the task.

    `training` has the batches, `drawn` the first micro-batches of the global batches of the newest step, `norms` the
    gradient norms, `stateful` the modules whose buffers a step may change.
    """

    def __init__(
        self,
        run: Assembled,
        rates: Rates,
        calls: CallbackCalls,
        saving: CheckpointSaver,
        shows: MediaLogger,
        features: Sequence[Feature],
        first_checks: Sequence[FirstStepCheck],
    ) -> None:
        parts, replica, optimizer = run.parts, run.replica, rates.optimizer
        self.training = parts.training
        self.drawn: list[MicroBatch] = []
        self.norms = GradientNorms()
        self._run, self._rates, self._calls, self._saving, self._shows = run, rates, calls, saving, shows
        self._batches = batches_per_step(parts.updates)
        self._after_step, self._after_draw = (methods_of(features, name) for name in ("after_step", "after_draw"))

        more = [module for one in features for module in one.stateful_modules()]
        self.stateful: nn.Module = nn.ModuleList([replica.unwrapped, *more]) if more else replica.unwrapped
        for feature in features:
            feature.start(self.stateful)
        optimizers = optimizer.parts if isinstance(optimizer, AlternatingOptimizer) else {"": optimizer}
        self._steppers = {
            update: Stepper(
                run.world,
                replica,
                task,
                only_one(features, "around_update", optimizers[update]),
                seed=parts.recipe.train.seed,
                stateful=self.stateful,
                features=features,
                first_checks=[partial(check, replica, task, self.stateful) for check in first_checks],
                saving=saving,
            )
            for update, task in tasks_by_update(parts.task).items()
        }
        wrapped: dict[str, TakesSteps] = {**self._steppers}
        for around in methods_of(features, "around_stepper"):
            wrapped = {update: around(stepper) for update, stepper in wrapped.items()}
        several: TakesSteps | None = only_one(features, "combine", wrapped, self._draw)
        self._stepper = several or wrapped[""]

    def begin(self, step: int) -> None:
        """Reads the data from the end of `step` on."""
        self._source = self.training.training(step * self._batches)

    def take(self, progress: Progress, *, measure: bool) -> dict[str, Total]:
        """Takes the next step; returns this rank's totals: the losses and, with `measure`, the task's metrics.

        Of a step that a rollback excluded, it only reads the samples.
        """
        step = self._shows.step = self._calls.step = self._run.parts.task.step_of_run = progress.step + 1
        heartbeat.enter_step(step)
        self._rates.set(step - 1, self._calls.lr_factor() if self._calls.sets_rates else 1.0)

        self.drawn = []
        totals: dict[str, Total] = {}
        first, micro_batches = self._draw()
        if step in progress.skipped_steps:
            deque(micro_batches, maxlen=0)
            for _ in range(1, self._batches):
                deque(self._draw()[1], maxlen=0)
            self._saving.before_update()  # callbacks after a step may change weights, too
        else:
            totals, norm = self._stepper.train_step(step, first, micro_batches, measure=measure)
            self.norms.add(step, norm)
            if self._calls.reads_gradients:
                self._calls.check_gradient()
            if self._after_step:
                self._after_step = tuple(after for after in self._after_step if after())
        progress.step = step
        for first in self.drawn:
            for note in self._after_draw:
                note(first)
            progress.samples += first.step_samples
        return totals

    def _draw(self) -> GlobalBatch:
        """Returns the next global batch: this rank's first micro-batch, and all; the caller must use up all of them."""
        heartbeat.beat(heartbeat.DATA)
        with waiting_for_data:
            first = next(self._source)
        self.drawn.append(first)
        return first, (first,) if first.last else _until_last(first, self._source)

    @property
    def counts(self) -> bool:
        """True if the task counts items that are not samples; known after the first step."""
        return any(stepper.counts for stepper in self._steppers.values())

    def take_empty(self) -> Tensor | float:
        """Returns the number of updates without an item on any rank since the last call (0-d, on the device)."""
        return sum((stepper.take_empty() for stepper in self._steppers.values()), start=torch.zeros(()))

    def nonfinite_inputs(self, error: Diverged) -> list[str]:
        """Returns a hint for each rank whose inputs of the newest step are not finite. Collective."""
        model = self._run.replica.unwrapped
        found = (check_together("failed_pass", error, model, one.data, "") for one in self.drawn)
        mine = next(filter(None, chain.from_iterable(found)), "")
        everywhere = self._run.world.global_ranks.all_gather_object(mine)
        return [f"on rank {rank}, {found}" for rank, found in enumerate(everywhere) if found]


def _until_last(first: MicroBatch, source: Iterator[MicroBatch]) -> Iterable[MicroBatch]:
    """Yields the micro-batches of one step, fetched one at a time."""
    micro = first
    while not micro.last:
        yield micro
        heartbeat.beat(heartbeat.DATA)
        with waiting_for_data:
            micro = next(source)
    yield micro
