"""The training loop: the order of a run, and the work between steps."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.data import Batches, MicroBatch
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import CheckpointError, Diverged
from ddpforge.interfaces import Callback, GoBack, Replica, Schedule, StepInfo, Task, Total, Tracker, World, device_kind
from ddpforge.ranks import heartbeat
from ddpforge.ranks.run_limits import RunLimits
from ddpforge.ranks.signals import NoData, StopRequests, waiting_for_data
from ddpforge.recipe.run_plan import RunPlan
from ddpforge.recipe.schema import Recipe
from ddpforge.runs.observers import Around
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer
from ddpforge.training.buffers import unchanged
from ddpforge.training.cadence import Alarm, Cadence
from ddpforge.training.callback_calls import CallbackCalls
from ddpforge.training.checkpoint_saver import CheckpointSaver
from ddpforge.training.checks import FirstStepCheck, check_together
from ddpforge.training.consensus import Consensus, EvaluationInterrupted, PeriodicCheck
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.features import Feature, TakesSteps, methods_of, only_one
from ddpforge.training.learning_rates import Rates
from ddpforge.training.media import MediaLogger
from ddpforge.training.nonfinite import NonfinitePolicy, RollBack
from ddpforge.training.progress import Progress
from ddpforge.training.restoring import is_another, restore_callbacks
from ddpforge.training.rows import RowBuilder
from ddpforge.training.step import Stepper
from ddpforge.training.updates import batches_per_step, reported_metrics, tasks_by_update, update_schedule

__all__ = ["Trainer"]

log = logging.getLogger("ddpforge")

_MOST_ROLLBACKS = 10


class Trainer:
    """Trainer of one model on one rank, in step with the other ranks.

    A step is one optimizer step, or the alternating updates of the task; micro-batches are its inner loop.
    `schedules` has the recipe's schedule as "", and the schedules of updates by name. Every public method is
    collective.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        world: World,
        replica: Replica,
        task: Task,
        optimizer: Optimizer,
        schedules: Mapping[str, Schedule],
        value_schedules: Mapping[str, Schedule] = {},
        plan: RunPlan,
        training: Batches,
        evaluator: Evaluator,
        callbacks: Mapping[str, Callback],
        checkpoints: Checkpoints,
        tracker: Tracker,
        saving: CheckpointSaver | None = None,
        limits: RunLimits | None = None,
        shows: MediaLogger | None = None,
        first_checks: Sequence[FirstStepCheck] = (),
        features: Sequence[Feature] = (),
    ) -> None:
        # parts of the run
        self.world, self.replica, self.task, self.optimizer = world, replica, task, optimizer
        self.plan, self.training, self.evaluator = plan, training, evaluator
        self._workers = training.workers
        self.tracker = tracker
        self.saving = saving or CheckpointSaver(
            checkpoints, recipe.checkpoint, replica, lambda: self.callbacks, tracker, features
        )
        self._recipe = recipe
        self._shows = shows or MediaLogger(tracker, is_rank_zero=world.is_rank_zero)
        self._features = features
        self._after_step, self._after_draw, self._rows, self._totals, self._takes, self._before_save = (
            methods_of(features, method)
            for method in ("after_step", "after_draw", "row", "totals", "take", "before_save")
        )
        self.calls = CallbackCalls(callbacks, replica, world.global_ranks)

        # cadences
        self.end = math.inf if plan.horizon.total is None else plan.horizon.total
        self.log_every = plan.every["track.every"]
        self.save_cadence = Cadence("checkpoint.every", recipe.checkpoint.every, plan.every)
        self.eval_cadence = Cadence("train.eval_every", recipe.train.eval_every, plan.every) if evaluator.sets else None
        self.cadences = [cadence for cadence in (self.save_cadence, self.eval_cadence) if cadence]
        checkpoints.keep_every = plan.every.get("checkpoint.keep.every")
        # A rollback needs a checkpoint, from the first step on.
        goes_back = recipe.train.on_nonfinite == "rollback" or any(one.goes_back for one in callbacks.values())
        self._saves_first = recipe.checkpoint.at_start or goes_back

        # the state of the run
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  # the newest value of every metric
        self._evaluated: int | None = None  # the step of the newest evaluation
        self._interrupted = False  # whether an evaluation was interrupted
        self._rollbacks, self._back_at = 0, -1  # rollbacks in a row to the same step, and that step
        self._drawn: list[MicroBatch] = []  # the first micro-batches of the global batches of this step

        # decisions of all ranks
        self.stop = StopRequests()
        alarms = [cadence.key for cadence in self.cadences]
        self.consensus = Consensus(world.global_ranks, self.stop, alarms, limits)
        self.nonfinite = NonfinitePolicy(recipe.train.on_nonfinite, replica)
        evaluator.looks = PeriodicCheck(self.consensus.poll)

        # Built before any state is restored: the recipe sets the learning rate, not a checkpoint.
        groups = recipe.optimizer.groups.items()
        starts = {name: plan.horizon.steps(group.start) for name, group in groups if group.start}
        self._rates = Rates(optimizer, schedules, value_schedules, starts)
        self._stateful: nn.Module = replica.unwrapped  # the modules whose buffers a step may change
        if more := [module for one in features for module in one.stateful_modules()]:
            self._stateful = nn.ModuleList([replica.unwrapped, *more])
        for feature in features:
            feature.start(self._stateful)
        self._steppers = self._steppers_by_update(first_checks)
        self._stepper = self._combined()
        updates = {update: recipe.optimizer.updates[update] for update in task.updates}
        self._draws = batches_per_step(updates)
        self.rows = RowBuilder(world, task, plan, self._rates, len(update_schedule(updates)))

    @property
    def callbacks(self) -> Mapping[str, Callback]:
        """Returns the callbacks of the run, by name."""
        return self.calls.callbacks

    def _steppers_by_update(self, first_checks: Sequence[FirstStepCheck]) -> dict[str, Stepper]:
        """Returns the stepper of each update by name; without updates, one stepper as ""."""
        replica, optimizer = self.replica, self.optimizer
        optimizers = optimizer.parts if isinstance(optimizer, AlternatingOptimizer) else {"": optimizer}
        return {
            update: Stepper(
                self.world,
                replica,
                task,
                only_one(self._features, "around_update", optimizers[update]),
                seed=self._recipe.train.seed,
                stateful=self._stateful,
                features=self._features,
                first_checks=[partial(check, replica, task, self._stateful) for check in first_checks],
                saving=self.saving,
            )
            for update, task in tasks_by_update(self.task).items()
        }

    def _combined(self) -> TakesSteps:
        """Returns the object that takes a step: a stepper, in what features put around it, or several in turn."""
        wrapped: dict[str, TakesSteps] = {**self._steppers}
        for around in methods_of(self._features, "around_stepper"):
            wrapped = {update: around(stepper) for update, stepper in wrapped.items()}
        several: TakesSteps | None = only_one(self._features, "combine", wrapped, self._draw)
        return several or wrapped[""]

    # ------------------------------------------------------------------------------------------ the run
    def restore(self, checkpoint: CheckpointReader) -> None:
        """Continues from `checkpoint`; any strategy and any number of ranks may have written it."""
        facts = checkpoint.metadata
        state = checkpoint.state()
        components = self._recipe.components().items()
        # A path of four keys is ("optimizer", "updates", NAME, "schedule"), which has no state.
        optimizers = [(path, one.use) for path, one in components if path[0] == "optimizer" and len(path) != 4]
        if any(is_another(facts, use, *path, world=self.world) for path, use in optimizers):
            state = replace(state, optimizer={}, extra_state={})
        for loaded in methods_of(self._features, "loaded_state"):
            state = loaded(state)
        self.replica.load_state(state)
        restore_callbacks(self._recipe, self.callbacks, checkpoint, self.world)
        checkpoint.finish()
        self.progress = Progress.of(facts)
        self._shows.step = facts.step
        self.metrics = dict(facts.metrics)
        self.saving.step = facts.step
        # A stop skips an evaluation that is due: the next attempt runs it first.
        self._evaluated = facts.step if any(name.startswith("eval/") for name in facts.metrics) else None

    def try_evaluation(self) -> None:
        """Evaluates a batch of each evaluation set, and drops the numbers: what fails then fails before training.

        Buffers and random numbers of the run stay unchanged. See `Evaluator.try_first_batches`.
        """
        with unchanged(self._stateful), isolated_rng(), self._shows.muted():
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
        left = self.progress.step < self.end or self._interrupted
        return "preempted" if self.consensus.agreed.stops and left else "done"

    def steps(self) -> Iterator[StepInfo]:
        """Yields each step after it is complete; raises the errors of `fit`.

        When the iterator is exhausted, the last step is saved.
        """
        self._began = time.monotonic() - self.progress.seconds
        with self.stop:
            if self.saving.step is None and self._saves_first:
                self._save()
            while True:
                try:
                    yield from self._train()
                    break
                except RollBack as request:
                    self._go_back(request)
                except Diverged as error:  # on all ranks: a checkpoint that is being written is still good
                    self.saving.wait_for_pending()
                    error.hints = (*self._nonfinite_inputs(error), *error.hints)
                    raise
            self.saving.wait_for_pending(last=True)

    def _train(self) -> Iterator[StepInfo]:
        self._source = self.training.training(self.progress.step * self._draws)
        self._prepare()
        reading_is_free = _reading_is_free(self.world.device)
        # A stop that was requested during the start does not wait for the first step, which may have to be compiled.
        ended = self.consensus.poll(0.0).stops or self.progress.step >= self.end
        if not self.consensus.agreed.stops and self._owes_evaluation():
            ended = self._evaluate_and_report(self.progress.step) or ended

        # The order is part of the contract: step, callbacks, log, evaluate, save. Callbacks come right after the step,
        # because their state (e.g. averaged weights) belongs to the step that is evaluated and saved.
        while not ended:
            step = self.progress.step + 1
            logs = step == 1 or step == self.end or step % self.log_every == 0
            agrees = logs or step % self.consensus.every == 0
            try:
                totals = self._step(step, measure=logs)
            except NoData:
                if self._drawn or self.progress.step == 0:
                    raise  # in the middle of a step, or before the first step
                self.consensus.stop_now()
                self._save(last=True)
                return
            if not reading_is_free:
                self.saving.reserve()

            log_bad = partial(self._log_bad, totals)
            if agrees or reading_is_free:
                self.nonfinite.apply(self.progress, log_bad, logs=logs)
            means = self._agree(totals, logs=logs) if agrees else {}
            wanted = self.consensus.agreed.wanted if agrees else frozenset[str]()
            stops = agrees and self.consensus.agreed.stops

            info = self._info(means)
            ended = self._report(info) or step == self.end or stops or "end" in wanted
            evaluates = False
            if self.eval_cadence and not (stops and step < self.end):  # a stop does not wait for an evaluation
                evaluates = ended or self.eval_cadence.due(step, wanted)
            saves = self.save_cadence.due(step, wanted)
            if evaluates or saves or ended:
                # The result of a bad step is neither evaluated nor saved.
                self.nonfinite.apply(self.progress, log_bad, logs=False)
            if evaluates:
                ended = self._evaluate_and_report(step) or ended
            if ended or saves or (evaluates and self._is_best(step)):
                self._save(last=ended)
            yield info

    def _nonfinite_inputs(self, error: Diverged) -> list[str]:
        """Returns a hint for each rank whose inputs of this step are not finite. Collective."""
        found = (check_together("failed_pass", error, self.replica.unwrapped, one.data, "") for one in self._drawn)
        mine = next(filter(None, chain.from_iterable(found)), "")
        everywhere = self.world.global_ranks.all_gather_object(mine)
        return [f"look at the data: on rank {rank}, {found}" for rank, found in enumerate(everywhere) if found]

    def _prepare(self) -> None:
        """Resets the state of the loop, at the start and after a rollback."""
        self.replica.module.train()
        self.calls.restart()
        self.rows.restart(self.progress.step)
        self.consensus.pace.restart()
        self.consensus.alarms = self._alarms()

    def _alarms(self) -> list[Alarm]:
        """Returns the wall-clock alarms on rank 0, and none on other ranks, which receive the result in a ballot."""
        if not self.world.is_rank_zero:
            return []
        alarms = [cadence.alarm for cadence in self.cadences if cadence.alarm]
        if (length := self._recipe.train.length).is_time:
            alarms.append(Alarm("end", length.seconds - self.progress.seconds))
        return alarms

    # ------------------------------------------------------------------------------------------ one step
    def _step(self, step: int, *, measure: bool) -> dict[str, Total]:
        """Takes one step; returns this rank's totals: the losses and, with `measure`, the task's metrics."""
        self._shows.step = step
        heartbeat.enter_step(step)
        self.calls.step = self.task.step_of_run = step
        self._rates.set(step - 1, self.calls.lr_factor() if self.calls.sets_rates else 1.0)

        self._drawn = []
        totals: dict[str, Total] = {}
        first, micro_batches = self._draw()
        if step in self.progress.skipped_steps:
            deque(micro_batches, maxlen=0)
            for _ in range(1, self._draws):
                deque(self._draw()[1], maxlen=0)
            self.saving.before_update()  # callbacks after a step may change weights, too
        else:
            totals, norm = self._stepper.train_step(step, first, micro_batches, measure=measure)
            self.nonfinite.norms.add(step, norm)
            if self.calls.reads_gradients:
                self.calls.check_gradient()
            if self._after_step:
                self._after_step = tuple(after for after in self._after_step if after())
        self.progress.step = step
        for first in self._drawn:
            for note in self._after_draw:
                note(first)
            self.progress.samples += first.step_samples
            self.rows.stopwatch.samples += first.step_samples
        self.rows.stopwatch.steps += 1
        self.consensus.pace.steps += 1
        return totals

    def _draw(self) -> tuple[MicroBatch, Iterable[MicroBatch]]:
        """Returns the next global batch: this rank's first micro-batch, and all; the caller must use up all of them."""
        heartbeat.beat(heartbeat.DATA)
        with waiting_for_data:
            first = next(self._source)
        self._drawn.append(first)
        return first, (first,) if first.last else _until_last(first, self._source)

    # ------------------------------------------------------------------------------------------ agreement
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
            empty = sum((stepper.take_empty() for stepper in self._steppers.values()), start=torch.zeros(()))
            riding |= self.rows.totals(totals, counts=self._counts, empty=empty)
            means = self.world.global_ranks.reduce_metrics({**totals, **riding}, reported_metrics(self.task))
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

    @property
    def _counts(self) -> bool:
        """True if the task counts items that are not samples; known after the first step."""
        return any(stepper.counts for stepper in self._steppers.values())

    def _log_bad(self, totals: Mapping[str, Total], step: int) -> None:
        """Logs the row of a step with a non-finite gradient: its norm and, if it is the current step, its loss."""
        means = (
            self.world.global_ranks.reduce_metrics(totals, reported_metrics(self.task))
            if step == self.progress.step
            else {}
        )
        row = {f"train/{name}": value for name, value in means.items()}
        self._log(step, {"samples": self.progress.samples, **row, "train/grad_norm": self.nonfinite.norms.newest})

    def _go_back(self, request: RollBack) -> None:
        """Restores the newest checkpoint, and skips the bad steps from now on; raises Diverged if it cannot."""
        heartbeat.beat(heartbeat.START)
        checkpoint = self.saving.newest()
        if checkpoint is not None and checkpoint.metadata.step != self._back_at:
            self._rollbacks, self._back_at = 0, checkpoint.metadata.step
        self._rollbacks += 1
        if checkpoint is None or self._rollbacks > _MOST_ROLLBACKS:
            raise Diverged(f"{request.why}, after {self._rollbacks - 1} rollbacks")
        left_out, skipped = self.progress.skipped_steps | set(request.bad), self.progress.nonfinite_steps
        self.restore(checkpoint)
        self.progress.skipped_steps, self.progress.nonfinite_steps = left_out, skipped
        self.tracker.rewind(self.progress.step)
        for callback in self.callbacks.values():
            callback.on_rollback(self.progress.step)
        log.warning("%s; back to step %d", request.why, self.progress.step)

    # ------------------------------------------------------------------------------------------ between steps
    def _info(self, means: dict[str, float]) -> StepInfo:
        """Returns the description of the current step, for callbacks and for the caller of `steps`."""
        lr, watch, norm = self.optimizer.param_groups[0]["lr"], self.rows.stopwatch, self.nonfinite.norms.newest
        row = self.rows.row(means, self.progress, lr=lr, grad_norm=norm) if means else {}
        if row:
            for columns in self._rows:
                row |= columns(self.progress.step)
        seconds = watch.seconds / max(1, watch.steps)
        return StepInfo(step=self.progress.step, samples=self.progress.samples, lr=lr, seconds=seconds, metrics=row)

    def _report(self, info: StepInfo) -> bool:
        """Calls the callbacks and logs the row of the step; returns True if a callback ends the run.

        Raises RollBack if a callback requests it.
        """
        heartbeat.beat(heartbeat.CALLBACKS)
        wishes = self.calls.on_step(info) if self.callbacks else {}
        if info.metrics:
            self._log(info.step, self.calls.with_columns(info))
            self.rows.finish_window(info.step, workers=self._workers)
        found = self.calls.agreed("on_step", wishes) if wishes else ()
        for wish in found:
            if isinstance(wish, GoBack):
                raise RollBack(wish.steps, wish.why)
        return any(found)

    def _log(self, step: int, row: Mapping[str, float]) -> None:
        self.metrics |= row
        self.tracker.log(step, row)

    def _owes_evaluation(self) -> bool:
        step = self.progress.step
        if self.eval_cadence is None or step == 0 or self._evaluated == step:
            return False
        if step >= self.end:
            return True
        return not self.eval_cadence.alarm and self.eval_cadence.due(step, ())

    def _evaluate_and_report(self, step: int) -> bool:
        self.rows.stopwatch.pause()
        try:
            row = self.evaluator.evaluate(step)
        except EvaluationInterrupted:  # the next attempt evaluates
            self._interrupted = True
            if not self.consensus.agreed.stops:  # no data came
                self.consensus.stop_now()
            return True
        except Exception:
            if self.evaluator.failed_together:
                self._rescue()
            raise
        self._evaluated = step
        self._log(step, row)
        keep = self._recipe.checkpoint.keep
        if keep.best and keep.monitor not in self.metrics and self.world.is_rank_zero:
            known = ", ".join(sorted(self.metrics))
            log.warning(
                "checkpoint.keep.monitor: no metric is named %s, so no checkpoint is best; there are %s",
                keep.monitor,
                known,
            )
        wishes = self.calls.on_eval(step, row)
        self.rows.stopwatch.resume()
        return any(self.calls.agreed("on_eval", wishes))

    def _rescue(self) -> None:
        """Saves the trained weights before an error ends the run, on all ranks; logs an error of saving."""
        try:
            self._save(last=True)
            self.saving.wait_for_pending(last=True)
            log.warning("the evaluation of step %d failed; the trained weights are saved", self.progress.step)
        except CheckpointError as error:
            log.warning("the evaluation of step %d failed, and saving too: %s", self.progress.step, error.message)

    def _is_best(self, step: int) -> bool:
        return self._evaluated == step and self.saving.is_best(self.metrics)

    def _save(self, *, last: bool = False) -> None:
        """Begins to save this step, unless it is saved already."""
        if self.saving.step == self.progress.step:
            return
        self.rows.stopwatch.pause()
        self.saving.wait_for_pending()
        for before in self._before_save:
            before()
        self.progress.seconds = time.monotonic() - self._began
        self.saving.save(self.progress, self._metrics_of(self.progress.step), last=last)
        self.rows.stopwatch.resume()

    def _metrics_of(self, step: int) -> dict[str, float]:
        """Returns the metrics of the weights at `step`, without those of an older evaluation."""
        stale = () if self._evaluated == step else ("eval/",)
        return {name: value for name, value in self.metrics.items() if not name.startswith(stale)}


def _reading_is_free(device: torch.device) -> bool:
    """True if reading a norm does not wait for the device."""
    return device_kind(device).is_host


def _until_last(first: MicroBatch, source: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """Yields the micro-batches of one step, fetched one at a time."""
    micro = first
    while not micro.last:
        yield micro
        heartbeat.beat(heartbeat.DATA)
        with waiting_for_data:
            micro = next(source)
    yield micro
