"""The training loop: what ranks agree on, and what happens between steps."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Literal, Protocol, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.data import Batches, MicroBatch
from ddpforge.errors import CheckpointError, Diverged, PluginError, UsageError
from ddpforge.interfaces import Callback, GoBack, Replica, Schedule, StepInfo, Task, Total, Tracker, World
from ddpforge.launchers.verdict import record_halt
from ddpforge.ranks import phases
from ddpforge.ranks.halt import Halt, NoHalt
from ddpforge.ranks.scheduling import look_for_others
from ddpforge.ranks.signals import NoData, StopRequests, waiting_for_data
from ddpforge.recipe.plan import Plan
from ddpforge.recipe.schema import Recipe
from ddpforge.strategies.several import InTurns
from ddpforge.training.agreement import HALT, STOP, Agreement, Ballot, Interrupted, Looks
from ddpforge.training.batchnorm import BatchNormAverager
from ddpforge.training.beside import with_statistics
from ddpforge.training.cadence import Alarm, Cadence, Stopwatch
from ddpforge.training.callbacks import add_numbers, may_end, overriding, reads_gradients
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.fingerprint import Fingerprint
from ddpforge.training.left_out import complete, without_state_of_frozen
from ddpforge.training.norms import GradientNorms
from ddpforge.training.one_turn import finished, of_turn, of_turns, reports_of
from ddpforge.training.progress import Progress
from ddpforge.training.rates import Rates
from ddpforge.training.restoring import is_another, restore_callbacks
from ddpforge.training.saving import Saving
from ddpforge.training.shows import Shows
from ddpforge.training.spending import Spending
from ddpforge.training.step import Stepper
from ddpforge.training.task_state import Unsaved
from ddpforge.training.turns import Turns
from ddpforge.training.whole import Whole

__all__ = ["Around", "Trainer"]

log = logging.getLogger("ddpforge")

_MOST_SKIPS = 100  # steps in a row without a finite gradient, after which skipping is no longer training
_MOST_ROLLBACKS = 10
_FACTOR = "callbacks/lr_factor"
_EMPTY = "?empty"  # the steps since the last row in which no target counted
_MANY_EMPTY = 100  # steps, all of them so, after which nothing will ever be learnt


class Around(Protocol):
    """A context around training that is told of every step, e.g. to profile some."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def before(self, step: int) -> None:
        """The next step is `step`."""

    def close(self, step: int) -> None:
        """No step follows; the next one would have been `step`."""


class _GoBack(Exception):
    """Training is to continue from the last checkpoint, without the steps in `bad`."""

    def __init__(self, bad: Sequence[int], why: str) -> None:
        self.bad, self.why = bad, why


class Trainer:
    """Trains one model on one rank, in step with the other ranks.

    A step is one optimizer step, or the turns of the task; micro-batches are its inner loop. `schedules` are those of
    turns that have one of their own. Every public method is collective.
    """

    def __init__(
        self,
        *,
        recipe: Recipe,
        world: World,
        replica: Replica,
        task: Task,
        optimizer: Optimizer,
        compares: bool = False,
        schedule: Schedule,
        schedules: Mapping[str, Schedule] | None = None,
        plan: Plan,
        training: Batches,
        evaluator: Evaluator,
        callbacks: Mapping[str, Callback],
        checkpoints: Checkpoints,
        tracker: Tracker,
        shows: Shows | None = None,
        unsaved: Unsaved | None = None,
        whole: Whole | None = None,
    ) -> None:
        # what the run is made of
        self.world = world
        self.replica = replica
        self.task = task
        self.optimizer = optimizer
        self.plan = plan
        self.training, self._workers = training, training.workers
        self.evaluator = evaluator
        self.callbacks = callbacks
        self.tracker = tracker
        self.saving = Saving(checkpoints, recipe.checkpoint, replica, lambda: self.callbacks, tracker, world.all)
        self._shows = shows or Shows(tracker, is_main=world.is_main)
        self._unsaved = unsaved  # None once it has looked
        self._shown_gradient: int | None = None  # the step whose gradient callbacks were shown last
        self._ending = {method: may_end(callbacks, method) for method in ("on_step", "on_eval")}
        self._reads_gradients = reads_gradients(callbacks)
        if self._reads_gradients:
            replica.on_gradient = self._show_gradient
        self._recipe = recipe

        # how often what happens
        self.end = math.inf if plan.horizon.total is None else plan.horizon.total
        self.log_every = plan.every["track.every"]
        self.save_cadence = Cadence("checkpoint.every", recipe.checkpoint.every, plan.every)
        self.eval_cadence = Cadence("train.eval_every", recipe.train.eval_every, plan.every) if evaluator.sets else None
        self.cadences = [cadence for cadence in (self.save_cadence, self.eval_cadence) if cadence]
        checkpoints.keep_every = plan.every.get("checkpoint.keep.every")
        # A rollback must always have something to go back to.
        goes_back = recipe.train.on_nonfinite == "rollback" or any(one.goes_back for one in callbacks.values())
        self._saves_first = recipe.checkpoint.at_start or goes_back

        # where it stands
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  # the newest value of every metric
        self._evaluated: int | None = None  # the step of the newest evaluation
        self._rollbacks, self._back_at = 0, -1  # how often in a row to the same step
        self._norms = GradientNorms()
        self._stopwatch = Stopwatch()
        self._pace = Stopwatch()  # since ranks agreed last; what callbacks do counts, so that slow ones delay no stop
        self._spending = Spending()
        self._shares: Mapping[str, float] = {}  # of wall time since the row before the newest, by phase
        self._items: float | None = None  # that a rank has in the step of the newest row; None where they are samples
        self._read = Fingerprint()
        self._empty, self._first_step = 0.0, 0  # steps in which no target counted, of those after `_first_step`

        # what ranks agree on
        self.stop = StopRequests()
        self.halt: Halt = NoHalt()
        self._ballot = Ballot([STOP, HALT, "end", *(cadence.key for cadence in self.cadences)])
        self._agreed = Agreement()
        self._agree_every = 1
        evaluator.looks = Looks(self._look)
        self._interrupted = False  # whether an evaluation was
        self._drawn: list[MicroBatch] = []  # the first micro-batches of the global batches of this step

        stateful = with_statistics(replica.bare, callbacks.values())
        statistics = BatchNormAverager(stateful if recipe.train.elastic_shards else None)
        parts = optimizer.parts if isinstance(optimizer, InTurns) else {"": optimizer}
        steppers = {
            turn: Stepper(
                world,
                replica,
                one,
                parts[turn],
                statistics,
                seed=recipe.train.seed,
                skips=recipe.train.on_nonfinite == "skip" or recipe.train.precision == "fp16",
                compares=compares,
                stateful=stateful,
                before_first=partial(whole.compare, replica, world) if whole else None,
                before_update=lambda: self.saving.before_update(),  # a trial puts another in its place
            )
            for turn, one in of_turns(task).items()
        }
        self._turns = Turns(replica, steppers, {turn: recipe.optimizer.turns[turn] for turn in task.turns})
        # Read before any state is restored: the recipe, not a checkpoint, decides the learning rate.
        self._rates = Rates(optimizer, schedule, schedules or {})

    # ------------------------------------------------------------------------------------------ the run
    def restore(self, checkpoint: Reader) -> None:
        """Goes on from `checkpoint`, whatever strategy and number of ranks wrote it."""
        facts = checkpoint.facts
        state = checkpoint.state()
        components = self._recipe.components().items()
        # Of four keys is ("optimizer", "turns", NAME, "schedule"), which has no state.
        optimizers = [(path, one.use) for path, one in components if path[0] == "optimizer" and len(path) != 4]
        if any(is_another(facts, use, *path, world=self.world) for path, use in optimizers):
            state = replace(state, optimizer={}, shared={})
        state = without_state_of_frozen(state, self.replica)
        self.replica.load_state(complete(state, self.replica, self.world.all))
        restore_callbacks(self._recipe, self.callbacks, checkpoint, self.world)
        checkpoint.finish()
        self.progress = Progress.of(facts)
        self._shows.step = facts.step
        self.metrics = dict(facts.metrics)
        self.saving.step = facts.step
        # Who stops a run does not wait for an evaluation that is due: the next attempt makes up for it.
        self._evaluated = facts.step if any(name.startswith("eval/") for name in facts.metrics) else None

    def fit(self, *around: Around) -> Literal["done", "stopped"]:
        """Trains to the end, or to a stop that all ranks agreed on; either way the last step is then saved.

        Each of `around` is entered, and told of every step that comes.

        Raises Diverged when a gradient is not finite and the recipe says stop, CheckpointError when a checkpoint
        cannot be written and the recipe says stop or it is the last one, and whatever a component raises.
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
        return "stopped" if self._agreed.stops and left else "done"

    def steps(self) -> Iterator[StepInfo]:
        """Trains one step after the other, each of which is complete when it is yielded; raises what `fit` does.

        What is left when it is exhausted is what `fit` leaves: the last step is saved.
        """
        self._began = time.monotonic() - self.progress.seconds
        with self.stop:
            if self.saving.step is None and self._saves_first:
                self._save()
            while True:
                try:
                    yield from self._train()
                    break
                except _GoBack as request:
                    self._go_back(request)
                except Diverged:  # on all ranks alike: what is being saved is still good
                    self.saving.settle()
                    raise
            self.saving.settle(last=True)

    @property
    def _epoch(self) -> float:
        """The number of steps of an epoch, where it is known."""
        return self.plan.horizon.steps_per_epoch or math.inf

    def _train(self) -> Iterator[StepInfo]:
        self._empty, self._first_step = 0.0, self.progress.step
        source = self.training.training(self.progress.step * self._turns.draws)
        alarms = self._alarms()
        self.replica.module.train()
        self._setting_rates = overriding(self.callbacks, "lr_factor")
        self._adding_columns = overriding(self.callbacks, "on_log")
        self._stopwatch.restart()
        self._pace.restart()
        self._spending.restart()
        looks_are_free = _looks_are_free(self.world.device)
        # Whoever asked while all this was starting does not wait for a step, which may have to be compiled.
        ended = self._look(0.0).stops or self.progress.step >= self.end
        if not self._agreed.stops and self._owes_evaluation():
            ended = self._evaluate_and_report(self.progress.step) or ended

        # The order is part of the contract: step, callbacks, log, evaluate, save. Callbacks come right after the
        # step because what they keep (averaged weights, say) belongs to the step that is evaluated and saved.
        while not ended:
            step = self.progress.step + 1
            logs = step == 1 or step == self.end or step % self.log_every == 0
            agrees = logs or step % self._agree_every == 0
            try:
                totals = self._step(step, source, measure=logs)
            except NoData:
                if self._drawn or self.progress.step == 0:
                    raise  # in the middle of a step, or with nothing to be saved
                self._agreed = Agreement(frozenset((STOP,)))
                self._save(last=True)
                return
            if not looks_are_free:
                self.saving.reserve()

            if agrees or looks_are_free:
                self._look_at_norms(totals, logs=logs)
            means = self._agree(totals, alarms, logs=logs) if agrees else {}
            wanted = self._agreed.wanted if agrees else frozenset[str]()
            stops = agrees and self._agreed.stops

            info = self._info(means)
            ended = self._report(info) or step == self.end or stops or "end" in wanted
            evaluates = self._must_evaluate(step, wanted, ended=ended, stops=stops)
            saves = self.save_cadence.due(step, wanted)
            if evaluates or saves or ended:
                # What a bad step left behind is not evaluated, nor saved to go back to.
                self._look_at_norms(totals, logs=False)
            if evaluates:
                ended = self._evaluate_and_report(step) or ended
            if ended or saves or self._is_best(step):
                self._save(last=ended)
            yield info

    def _alarms(self) -> list[Alarm]:
        """The alarms that the clock sets off. Only rank 0's clock counts; the others learn of it when ranks agree."""
        if not self.world.is_main:
            return []
        alarms = [cadence.alarm for cadence in self.cadences if cadence.alarm]
        if (length := self._recipe.train.length).is_time:
            alarms.append(Alarm("end", length.seconds - self.progress.seconds))
        return alarms

    # ------------------------------------------------------------------------------------------ one step
    def _step(self, step: int, source: Iterator[MicroBatch], *, measure: bool) -> dict[str, Total]:
        """One step. Returns this rank's totals: the losses and, when `measure`, the task's metrics."""
        self._shows.step = step
        phases.enter_step(step)
        self._factor = self._wanted_factor()
        self._rates.set(step - 1, self._factor)

        drawn = self._drawn = list[MicroBatch]()
        draws = self._draws(source, drawn)
        totals: dict[str, Total] = {}
        if step in self.progress.left_out:
            for _, micro_batches in draws:
                deque(micro_batches, maxlen=0)
            self.saving.before_update()  # what follows a step may change weights, too
        else:
            totals, norm = self._turns.train(step, draws, measure=measure)
            self._norms.add(step, norm)
            if self._reads_gradients and self._shown_gradient is None:
                kind = type(self.replica).__name__
                raise PluginError(
                    f"{kind} promises that callbacks can read gradients, and its step called none of them"
                )
            if self._unsaved and not self._unsaved.look():
                self._unsaved = None
        self.progress.step = step
        for first in drawn:
            self._read.note(first)
            self.progress.samples += first.step_samples
        self._stopwatch.add(sum(first.step_samples for first in drawn))
        self._pace.add(0)
        return totals

    def _wanted_factor(self) -> float:
        """Multiplies the factors of all callbacks; raises PluginError for one that is no factor."""
        factor = 1.0
        for name in self._setting_rates:
            asked: Any = self.callbacks[name].lr_factor()
            is_number = isinstance(asked, Real)
            if not (is_number and 0 <= asked < math.inf):
                raise PluginError(
                    f"callback `{name}` multiplies the learning rate of step {self.progress.step + 1} with {asked!r}",
                    hints=["return a finite number of 0 or more from `lr_factor`"],
                )
            factor *= asked
        return factor

    def _show_gradient(self, norm: Tensor) -> None:
        self._shown_gradient = self.progress.step + 1
        for callback in self.callbacks.values():
            callback.on_gradient(self.progress.step + 1, norm)

    def _draws(
        self, source: Iterator[MicroBatch], drawn: list[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, Iterator[MicroBatch]]]:
        """The global batches of a step, each to be used up before the next; the first of each goes into `drawn`."""
        for _ in range(self._turns.draws):
            phases.mark(phases.DATA)
            with waiting_for_data:
                drawn.append(next(source))
            yield drawn[-1], _until_last(drawn[-1], source)

    # ------------------------------------------------------------------------------------------ agreement
    def _agree(self, totals: Mapping[str, Total], alarms: Iterable[Alarm], *, logs: bool) -> dict[str, float]:
        """One reduction over ranks: whether anybody wants to stop or an alarm rang, and where it `logs` the means.

        Where it does not, no device is waited for.
        """
        pace = self._pace.seconds / self._pace.steps
        self._pace.restart()
        ballot = self._ballot.totals(self._wishes(alarms), seconds=pace, saved=self.saving.ready)

        phases.mark(phases.REDUCE)
        rates = {_FACTOR: self._factor} if self._setting_rates else {}
        said = {**ballot, **self._read.totals(), **rates}
        if logs:
            spent = self._spending.totals(totals, counts=self._turns.counts) if totals else {}
            empty = {_EMPTY: Total(torch.as_tensor(self._turns.take_empty()), 1)} if self._turns.counts else {}
            means = self.world.all.mean({**totals, **said, **spent, **empty}, reports_of(self.task))
            self._look_at_targets(means.pop(_EMPTY, 0.0))
            if spent:
                self._shares, self._items = self._spending.taken(means)
        else:
            means = self.world.all.average(said)
        self._read.refuse_another(means, step=self.progress.step)
        self._refuse_another_factor(means.pop(_FACTOR, self._factor))
        self._count(means)
        if self._agreed.all_saved:
            self.saving.settle()
        self._agree_every = self._agreed.every
        return means

    def _look_at_targets(self, empty: float) -> None:
        """Logs in how many steps since the last row no target counted; raises UsageError if none ever did."""
        if not empty:
            return
        before, self._empty = self._empty, self._empty + empty
        steps = self.progress.step - self._first_step
        if self._empty >= steps * len(self._turns.updates) and (
            steps >= _MANY_EMPTY or (self._first_step == 0 and self.progress.step >= min(self.end, self._epoch))
        ):
            raise UsageError(
                f"no target has counted in {steps} steps: nothing is learnt",
                hints=[
                    "look at the targets that the dataset gives (`ddpforge data show`): all are the ignored one, or "
                    "truncation has cut them off"
                ],
            )
        if before == 0 or int(self._empty).bit_length() > int(before).bit_length():
            log.warning(
                "by step %d no target counted in %d of %d steps: their gradient is zero, and the optimizer's momentum "
                "and weight decay act alone",
                self.progress.step,
                self._empty,
                steps,
            )

    def _wishes(self, alarms: Iterable[Alarm] = ()) -> set[str]:
        """This rank's."""
        wanted = {alarm.name for alarm in alarms if alarm.rings()}
        wanted |= {STOP} if self.stop.requested else set()
        return wanted | ({HALT} if self.halt.asked() else set())

    def _look(self, seconds: float) -> Agreement:
        """The same agreement where no step is done, whose parts take so many seconds here: only about stopping."""
        ballot = self._ballot.totals(self._wishes(), seconds=seconds, saved=False)
        return self._count(self.world.all.average(ballot))

    def _count(self, means: dict[str, float]) -> Agreement:
        look_for_others()  # ranks agree about once a second, in training and in evaluations
        self._agreed = self._ballot.count(means)
        if HALT in self._agreed.wanted:
            record_halt()
            self.halt.obeyed()
        return self._agreed

    def _refuse_another_factor(self, mean: float) -> None:
        """Raises PluginError where callbacks of other ranks want other rates, which would part the weights."""
        if not math.isclose(mean, self._factor, rel_tol=1e-9, abs_tol=1e-12):
            raise PluginError(
                f"callbacks {', '.join(self._setting_rates)} multiply the learning rate of step {self.progress.step} "
                f"with {self._factor:g} on this rank and {mean:g} on average",
                hints=["decide in `lr_factor` from what callbacks are told, which is the same on every rank"],
            )

    def _look_at_norms(self, totals: Mapping[str, Total], *, logs: bool) -> None:
        """Does what the recipe says where a gradient was not finite; `logs` says that the step is to have a row.

        The norm is that of the reduced gradient, hence the same on every rank, and the strategy has kept such a
        gradient away from the weights already: all ranks come to the same decision without talking.
        """
        bad = self._norms.take()
        self.progress.skipped += len(bad)
        if not bad or self.replica.overflowed():
            return

        goes_on = self._recipe.train.on_nonfinite == "skip" and self._norms.nonfinite_in_a_row < _MOST_SKIPS
        if not (goes_on and logs and bad[-1] == self.progress.step):  # else the row of this step says it
            self._log_bad(bad[-1], totals)
        if self._recipe.train.on_nonfinite == "rollback":
            raise _GoBack(bad, f"the gradient of step {bad[0]} is not finite")
        if not goes_on:
            raise Diverged(
                f"the gradient of step {bad[0]} is not finite; it was kept away from the weights",
                hints=[
                    "lower optimizer.lr, set train.clip_norm, or look at that step's samples",
                    'or let the run continue with train.on_nonfinite = "skip" or "rollback"',
                ],
            )
        log.warning("step %s: the gradient is not finite; left out", ", ".join(map(str, bad)))

    def _log_bad(self, step: int, totals: Mapping[str, Total]) -> None:
        """The log tells the truth about a bad step: its loss, where it is still at hand, and its norm."""
        means = self.world.all.mean(totals, reports_of(self.task)) if step == self.progress.step else {}
        row = {f"train/{name}": value for name, value in means.items()}
        self._log(step, {"samples": self.progress.samples, **row, "train/grad_norm": self._norms.newest})

    def _go_back(self, request: _GoBack) -> None:
        """Restores the newest checkpoint and leaves the bad steps out from now on."""
        phases.mark(phases.START)
        checkpoint = self.saving.newest()
        if checkpoint is not None and checkpoint.facts.step != self._back_at:
            self._rollbacks, self._back_at = 0, checkpoint.facts.step
        self._rollbacks += 1
        if checkpoint is None or self._rollbacks > _MOST_ROLLBACKS:
            raise Diverged(f"{request.why}, after {self._rollbacks - 1} rollbacks")
        left_out, skipped = self.progress.left_out | set(request.bad), self.progress.skipped
        self.restore(checkpoint)
        self.progress.left_out, self.progress.skipped = left_out, skipped
        self.tracker.rewind(self.progress.step)
        for callback in self.callbacks.values():
            callback.on_rollback(self.progress.step)
        log.warning("%s; back to step %d", request.why, self.progress.step)

    # ------------------------------------------------------------------------------------------ between steps
    def _info(self, means: dict[str, float]) -> StepInfo:
        """The facts of the step for callbacks, and for whoever takes steps one by one."""
        lr = self.optimizer.param_groups[0]["lr"]
        row = self._row(means, lr) if means else {}
        seconds = self._stopwatch.seconds / max(1, self._stopwatch.steps)
        return StepInfo(step=self.progress.step, samples=self.progress.samples, lr=lr, seconds=seconds, metrics=row)

    def _report(self, info: StepInfo) -> bool:
        """Tells callbacks and tracker about the step; True when a callback wants the run to end."""
        phases.mark(phases.CALLBACKS)
        wishes: dict[str, bool | GoBack | None] = {}
        if self.callbacks:
            with self.replica.weights.observing():
                wishes = {name: callback.on_step(info) for name, callback in self.callbacks.items()}
        if info.metrics:
            row = {**info.metrics}
            for name in self._adding_columns:
                add_numbers(row, name, "on_log", self.callbacks[name].on_log(replace(info, metrics=dict(row))))
            self._log(info.step, row)
            waited = self._shares.get(phases.NAMES[phases.DATA], 0.0)
            if advice := self._spending.advice(waited, self._stopwatch.seconds, workers=self._workers):
                log.warning("step %d: %s", info.step, advice)
            self._stopwatch.restart()
        found = self._wanted_by_callbacks("on_step", wishes)
        for wish in found:
            if isinstance(wish, GoBack):
                raise _GoBack(wish.steps, wish.why)
        return any(found)

    def _wanted_by_callbacks(
        self, method: str, wishes: Mapping[str, bool | GoBack | None]
    ) -> Sequence[bool | GoBack | None]:
        """The wishes of callbacks on all ranks: one that decides by what its rank alone knows ends all of them.

        They are exchanged on the host, where there are callbacks that may have any: see `may_end`.
        """
        asking = self._ending[method]
        for name, wish in wishes.items():
            if wish and name not in asking and self.world.all.size > 1:
                raise PluginError(
                    f"callback `{name}` returned {wish!r} from `{method}`, which is declared to return None",
                    hints=[f"declare it: def {method}(...) -> bool | None"],
                )
        mine = [wishes[name] for name in asking if wishes.get(name)]
        if self.world.all.size == 1 or not asking:
            return [wish for wish in wishes.values() if wish]
        return [wish for told in self.world.all.everyone(mine) for wish in told]

    def _row(self, means: dict[str, float], lr: float) -> dict[str, float]:
        row = {f"train/{name}": value for name, value in finished(self.task, means).items()}
        row |= {"train/grad_norm": self._norms.newest, "lr": lr, "samples": self.progress.samples}
        row |= {of_turn("lr", name): rate for name, rate in self._rates.named().items()}
        row["train/samples_per_second"] = self._stopwatch.samples / self._stopwatch.seconds
        if self._items is not None:
            per_second = self._items * self.world.data.size * self._stopwatch.steps / self._stopwatch.seconds
            row[f"train/{self.task.items}_per_second"] = per_second
        row |= {f"train/time/{phase}": share for phase, share in self._shares.items()}
        if per_epoch := self.plan.horizon.steps_per_epoch:
            row["epoch"] = self.progress.step / per_epoch
        if self.progress.skipped:
            row["train/skipped_steps"] = self.progress.skipped
        return row

    def _log(self, step: int, row: Mapping[str, float]) -> None:
        self.metrics |= row
        self.tracker.log(step, row)

    def _must_evaluate(self, step: int, wanted: Collection[str], *, ended: bool, stops: bool) -> bool:
        if self.eval_cadence is None or (stops and step < self.end):
            return False  # whoever asked us to stop is waiting
        return ended or self.eval_cadence.due(step, wanted)

    def _owes_evaluation(self) -> bool:
        step = self.progress.step
        if self.eval_cadence is None or step == 0 or self._evaluated == step:
            return False
        if step >= self.end:
            return True
        return not self.eval_cadence.alarm and self.eval_cadence.due(step, ())

    def _evaluate_and_report(self, step: int) -> bool:
        self._stopwatch.pause()
        try:
            row = self.evaluator.evaluate(step)
        except Interrupted:  # the next attempt evaluates
            self._interrupted = True
            if not self._agreed.stops:  # no data came
                self._agreed = Agreement(frozenset((STOP,)))
            return True
        except Exception:
            if self.evaluator.failed_together:
                self._rescue()
            raise
        self._evaluated = step
        self._log(step, row)
        keep = self._recipe.checkpoint.keep
        if keep.best and keep.by not in self.metrics and self.world.is_main:
            known = ", ".join(sorted(self.metrics))
            log.warning("checkpoint.keep.by: no metric is called %s, so none is best; there are %s", keep.by, known)
        with self.replica.weights.observing():
            wishes = {name: callback.on_eval(step, row) for name, callback in self.callbacks.items()}
        self._stopwatch.resume()
        return any(self._wanted_by_callbacks("on_eval", wishes))

    def _rescue(self) -> None:
        """Saves what was trained before an error ends the run, on all ranks; logs why where it cannot be saved."""
        try:
            self._save(last=True)
            self.saving.settle(last=True)
            log.warning("the evaluation of step %d failed; what was trained is saved", self.progress.step)
        except CheckpointError as error:
            log.warning("the evaluation of step %d failed, and so did saving: %s", self.progress.step, error.message)

    def _is_best(self, step: int) -> bool:
        return self._evaluated == step and self.saving.is_best(self.metrics)

    def _save(self, *, last: bool = False) -> None:
        """Begins to save this step, unless that is done already."""
        if self.saving.step == self.progress.step:
            return
        self._stopwatch.pause()
        self.saving.settle()
        self.progress.seconds = time.monotonic() - self._began
        self.saving.save(self.progress, self._metrics_of(self.progress.step), last=last)
        self._stopwatch.resume()

    def _metrics_of(self, step: int) -> dict[str, float]:
        """The metrics of the weights at `step`; an older evaluation says nothing about them."""
        stale = () if self._evaluated == step else ("eval/",)
        return {name: value for name, value in self.metrics.items() if not name.startswith(stale)}


def _looks_are_free(device: torch.device) -> bool:
    """True if reading a norm does not wait for the device."""
    return device.type == "cpu"


def _until_last(first: MicroBatch, source: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """The micro-batches of one step, fetched one at a time."""
    micro = first
    while not micro.last:
        yield micro
        phases.mark(phases.DATA)
        with waiting_for_data:
            micro = next(source)
    yield micro
