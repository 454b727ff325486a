"""The training loop: the order of a run, and the decisions of all ranks between steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import Diverged
from ddpforge.interfaces import Callback, GoBack, StepInfo, Total, device_kind
from ddpforge.ranks import heartbeat
from ddpforge.ranks.signals import NoData
from ddpforge.runs.observers import Around
from ddpforge.training.buffers import unchanged
from ddpforge.training.cadence import Cadences
from ddpforge.training.callback_calls import CallbackCalls
from ddpforge.training.consensus import Consensus
from ddpforge.training.features import Assembled, Feature, methods_of
from ddpforge.training.media import MediaLogger
from ddpforge.training.milestones import Milestones
from ddpforge.training.nonfinite import NonfinitePolicy, RollBack, Rollbacks
from ddpforge.training.progress import Progress
from ddpforge.training.restoring import restore_training
from ddpforge.training.rows import RowBuilder
from ddpforge.training.stepping import Stepping
from ddpforge.training.updates import reported_metrics

__all__ = ["Trainer"]

log = logging.getLogger("ddpforge")


class Trainer:
    """Trainer of one model on one rank, in step with the other ranks.

    It decides what happens in which order; `stepping` takes steps, `milestones` evaluates and saves, `rows` logs.
    Every public method is collective.
    """

    def __init__(
        self,
        run: Assembled,
        optimizer: Optimizer,
        stepping: Stepping,
        milestones: Milestones,
        rows: RowBuilder,
        calls: CallbackCalls,
        consensus: Consensus,
        cadences: Cadences,
        shows: MediaLogger,
        features: Sequence[Feature],
    ) -> None:
        self.world, self.replica, self.optimizer, self.plan = run.world, run.replica, optimizer, run.parts.plan
        self.stepping, self.milestones, self.rows, self.calls = stepping, milestones, rows, calls
        self.evaluator, self.saving = milestones.evaluator, milestones.saving
        self.consensus, self.stop, self.cadences = consensus, consensus.stop, cadences
        self._run, self._shows, self._features = run, shows, features
        self._totals, self._takes = methods_of(features, "totals"), methods_of(features, "take")
        recipe, total = run.parts.recipe, run.parts.plan.horizon.total
        self._nonfinite = NonfinitePolicy(recipe.train.on_nonfinite, run.replica, stepping.norms)
        self._rollbacks = Rollbacks()
        # A rollback needs a checkpoint, from the first step on.
        goes_back = recipe.train.on_nonfinite == "rollback" or any(one.goes_back for one in calls.callbacks.values())
        self._saves_first = recipe.checkpoint.at_start or goes_back
        self.end = math.inf if total is None else total
        self.progress = Progress()

    @property
    def callbacks(self) -> Mapping[str, Callback]:
        """Returns the callbacks of the run, by name."""
        return self.calls.callbacks

    def restore(self, checkpoint: CheckpointReader) -> None:
        """Continues from `checkpoint`; any strategy and any number of ranks may have written it."""
        restore_training(self._run, self.callbacks, checkpoint, self._features)
        self.progress = Progress.of(checkpoint.metadata)
        self._shows.step = self.progress.step
        self.milestones.restore(checkpoint.metadata)

    def try_evaluation(self) -> None:
        """Evaluates a batch of each evaluation set, and drops the numbers: what fails then fails before training.

        Buffers and random numbers of the run stay unchanged. See `Evaluator.try_first_batches`.
        """
        with unchanged(self.stepping.stateful), isolated_rng(), self._shows.muted():
            self.evaluator.try_first_batches()

    def fit(self, *around: Around) -> Literal["done", "preempted"]:
        """Trains to the end, or until all ranks agree to stop; then saves the last step.

        Each of `around` is entered, and receives the number of every step before it.

        Raises:
            Diverged: a gradient is not finite, and `train.on_nonfinite` does not let the run continue.
            CheckpointError: a checkpoint cannot be written, and it is the last one or `checkpoint.on_failure` is
                "stop".
            Exception: any error of a component.
        """
        with ExitStack() as stack:
            for one in around:
                stack.enter_context(one).before(self.progress.step + 1)
            for info in self.steps():
                for one in around:
                    one.before(info.step + 1)
            for one in around:
                one.close(self.progress.step + 1)
        left = self.progress.step < self.end or self.milestones.interrupted
        return "preempted" if self.consensus.agreed.stops and left else "done"

    def steps(self) -> Iterator[StepInfo]:
        """Yields each step after it is complete; raises the errors of `fit`.

        When the iterator is exhausted, the last step is saved.
        """
        self.milestones.start(self.progress)
        with self.stop:
            if self.saving.step is None and self._saves_first:
                self.milestones.save(self.progress)
            while True:
                try:
                    yield from self._train()
                    break
                except RollBack as request:
                    self._go_back(request)
                except Diverged as error:  # on all ranks: a checkpoint that is being written is still good
                    self.saving.wait_for_pending()
                    error.hints = (*self.stepping.nonfinite_inputs(error), *error.hints)
                    raise
            self.saving.wait_for_pending(last=True)

    def _train(self) -> Iterator[StepInfo]:
        self.stepping.begin(self.progress.step)
        self.replica.module.train()
        self.calls.restart()
        self.rows.restart(self.progress.step)
        # Only rank 0's clock counts: the other ranks receive the result in a ballot.
        self.consensus.restart(self.cadences.alarms(self.progress.seconds) if self.world.is_rank_zero else [])
        reading_is_free = _reading_is_free(self.world.device)
        # A stop that was requested during the start does not wait for the first step, which may have to be compiled.
        ended = self.consensus.poll(0.0).stops or self.progress.step >= self.end
        owed = self.cadences.owes_evaluation(self.progress.step, self.end)
        if owed and not self.consensus.agreed.stops and self.milestones.evaluated != self.progress.step:
            ended = self.milestones.evaluate(self.progress) or ended

        # The order is part of the contract: step, callbacks, log, evaluate, save. Callbacks come right after the step,
        # because their state (e.g. averaged weights) belongs to the step that is evaluated and saved.
        while not ended:
            step = self.progress.step + 1
            logs = step == 1 or step == self.end or step % self.cadences.log_every == 0
            agrees = logs or step % self.consensus.every == 0
            samples = self.progress.samples
            try:
                totals = self.stepping.take(self.progress, measure=logs)
            except NoData:
                if self.stepping.drawn or self.progress.step == 0:
                    raise  # in the middle of a step, or before the first step
                self.consensus.stop_now()
                self.milestones.save(self.progress, last=True)
                return
            self.rows.stopwatch.samples += self.progress.samples - samples
            self.rows.stopwatch.steps += 1
            self.consensus.pace.steps += 1
            if not reading_is_free:
                self.saving.reserve()

            log_bad = partial(self.rows.log_nonfinite, totals, self.progress)
            if agrees or reading_is_free:
                self._nonfinite.apply(self.progress, log_bad, logs=logs)
            means = self._agree(totals, logs=logs) if agrees else {}
            wanted = self.consensus.agreed.wanted if agrees else frozenset[str]()
            stops = agrees and self.consensus.agreed.stops

            info = self.rows.info(means, self.progress, self.stepping.norms.newest)
            ended = self._report(info) or step == self.end or stops or "end" in wanted
            evaluates = False
            if self.cadences.evaluation and not (stops and step < self.end):  # a stop does not wait for an evaluation
                evaluates = ended or self.cadences.evaluation.due(step, wanted)
            saves = self.cadences.save.due(step, wanted)
            if evaluates or saves or ended:
                # The result of a bad step is neither evaluated nor saved.
                self._nonfinite.apply(self.progress, log_bad, logs=False)
            if evaluates:
                ended = self.milestones.evaluate(self.progress) or ended
            if ended or saves or (evaluates and self.milestones.is_best(step)):
                self.milestones.save(self.progress, last=ended)
            yield info

    def _agree(self, totals: Mapping[str, Total], *, logs: bool) -> dict[str, float]:
        """Reduces the requests of ranks and, if the step `logs`, the metrics over all ranks; returns their means.

        It does not wait for the device unless the step logs.
        """
        riding: dict[str, Any] = {**self.consensus.totals(saved=self.saving.ready)}
        for own in self._totals:
            riding |= own()
        if self.calls.sets_rates:
            riding |= self.calls.totals()
        heartbeat.beat(heartbeat.REDUCE)
        if logs:
            riding |= self.rows.totals(totals, counts=self.stepping.counts, empty=self.stepping.take_empty())
            reported = reported_metrics(self._run.parts.task)
            means = self.world.global_ranks.reduce_metrics({**totals, **riding}, reported)
            self.rows.take(means, self.progress, self.end)
        else:
            means = self.world.global_ranks.all_reduce_mean(riding)
        for take in self._takes:
            take(means, self.progress.step)
        if self.calls.sets_rates:
            self.calls.take(means)
        if self.consensus.take(means).all_saved:
            self.saving.wait_for_pending()
        return means

    def _report(self, info: StepInfo) -> bool:
        """Calls the callbacks and logs the row of the step; returns True if a callback ends the run.

        Raises RollBack if a callback requests it.
        """
        heartbeat.beat(heartbeat.CALLBACKS)
        wishes = self.calls.on_step(info) if self.calls.callbacks else {}
        if info.metrics:
            self.rows.log(info.step, self.calls.with_columns(info))
            self.rows.finish_window(info.step)
        found = self.calls.agreed("on_step", wishes) if wishes else ()
        for wish in found:
            if isinstance(wish, GoBack):
                raise RollBack(wish.steps, wish.why)
        return any(found)

    def _go_back(self, request: RollBack) -> None:
        """Restores the newest checkpoint, and skips the bad steps from now on; raises Diverged if it cannot."""
        heartbeat.beat(heartbeat.START)
        checkpoint = self._rollbacks.count(request, self.saving.newest())
        left_out, skipped = self.progress.skipped_steps | set(request.bad), self.progress.nonfinite_steps
        self.restore(checkpoint)
        self.progress.skipped_steps, self.progress.nonfinite_steps = left_out, skipped
        self.rows.tracker.rewind(self.progress.step)
        for callback in self.callbacks.values():
            callback.on_rollback(self.progress.step)
        log.warning("%s; back to step %d", request.why, self.progress.step)


def _reading_is_free(device: torch.device) -> bool:
    """True if reading a norm does not wait for the device."""
    return device_kind(device).is_host
