"""The training loop: what ranks agree on, evaluation, and what else happens between steps."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.optim import Optimizer

from ddpforge.checkpoint.contents import Facts, RankState
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.data import Batches, MicroBatch
from ddpforge.errors import CheckpointError, Diverged, PluginError, UsageError
from ddpforge.interfaces import Callback, Replica, Schedule, StepInfo, Task, Total, Tracker, World
from ddpforge.interfaces.durations import Horizon
from ddpforge.ranks.signals import StopRequests
from ddpforge.recipe.schema import Recipe
from ddpforge.recipe.toml import loads
from ddpforge.training.batchnorm import Statistics
from ddpforge.training.cadence import Alarm, Cadence, Window, in_steps
from ddpforge.training.norms import GradientNorms
from ddpforge.training.progress import Progress
from ddpforge.training.step import Steps

__all__ = ["Trainer"]

log = logging.getLogger("ddpforge")

_AGREE_SECONDS = 1.0  # how long a stop request on one rank may go unnoticed by the others
_MOST_SKIPS = 100  # steps in a row without a finite gradient, after which skipping is no longer training
_MOST_ROLLBACKS = 10


class _GoBack(Exception):
    """Training is to go on from the last checkpoint, without the steps in `bad`."""

    def __init__(self, bad: list[int]) -> None:
        self.bad = bad


class Trainer:
    """Trains one model on one rank, in step with the other ranks.

    A step is one optimizer step; micro-batches are its inner loop. Every public method is collective.
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
        horizon: Horizon,
        training: Batches,
        evaluation: Batches | None,
        callbacks: Mapping[str, Callback],
        checkpoints: Checkpoints,
        tracker: Tracker,
    ) -> None:
        # what the run is made of
        self.settings, self.saving = recipe.train, recipe.checkpoint
        self.world, self.replica, self.task = world, replica, task
        self.optimizer, self.schedule = optimizer, schedule
        self.horizon, self.training, self.evaluation = horizon, training, evaluation
        self.callbacks, self.checkpoints, self.tracker = callbacks, checkpoints, tracker
        self._uses: dict[tuple[str, ...], str] = {("optimizer",): recipe.optimizer.use}  # by the recipe's table
        self._uses |= {("callbacks", name): component.use for name, component in recipe.callbacks.items()}
        self.origin: Mapping[str, Any] = {}  # recipe, lineage, …: what a checkpoint says of its origin

        # how often what happens
        self.end = math.inf if horizon.total is None else horizon.total
        self.log_every = in_steps("track.every", recipe.track.every, horizon)
        # A rollback must always have something to go back to.
        self._saves_first = recipe.checkpoint.at_start or recipe.train.on_nonfinite == "rollback"
        if recipe.checkpoint.keep.every:
            checkpoints.keep_every = in_steps("checkpoint.keep.every", recipe.checkpoint.keep.every, horizon)
        self.save_cadence = Cadence("checkpoint.every", recipe.checkpoint.every, horizon)
        self.cadences = [self.save_cadence]
        if evaluation is not None:
            self.eval_cadence = Cadence("train.eval_every", recipe.train.eval_every, horizon)
            self.cadences.append(self.eval_cadence)

        # where it stands
        self.progress = Progress()
        self.metrics: dict[str, float] = {}  # the newest value of every metric
        self._saved: int | None = None  # the newest step that is in a checkpoint, or on its way there
        self._evaluated: int | None = None
        statistics = Statistics(replica.bare if recipe.train.elastic_shards else None)
        skips = recipe.train.on_nonfinite == "skip" or recipe.train.precision == "fp16"
        self._steps = Steps(
            world, replica, task, optimizer, statistics, seed=recipe.train.seed, skips=skips, compares=compares
        )
        self._norms = GradientNorms()
        self._rollbacks = 0
        self._agreed: set[str] = set()  # what all ranks know to be wanted: stop, end, …
        self._agree_every = 1
        self.stop = StopRequests()
        self._window = Window()
        self._read = 0  # of a stream: what the newest micro-batch says has been read

        # Read before any state is restored: the recipe, not a checkpoint, decides the learning rate.
        self._base_rates: list[float] = [group["lr"] for group in optimizer.param_groups]

    # ------------------------------------------------------------------------------------------ the run
    def restore(self, checkpoint: Reader) -> None:
        """Goes on from `checkpoint`, whatever strategy and number of ranks wrote it."""
        facts = checkpoint.facts
        state = checkpoint.state()
        if self._is_another(facts, "optimizer"):
            state = replace(state, optimizer={}, shared={})
        self.replica.load_state(state)
        kept = checkpoint.callbacks()
        for name, callback in self.callbacks.items():
            if name in kept and not self._is_another(facts, "callbacks", name):
                callback.load_state(kept[name])
        checkpoint.finish()
        self.progress = Progress.of(facts)
        self.metrics = dict(facts.metrics)
        self._saved = facts.step
        # Who stops a run does not wait for an evaluation that is due: the next attempt makes up for it.
        self._evaluated = facts.step if any(name.startswith("eval/") for name in facts.metrics) else None

    def _is_another(self, facts: Facts, *table: str) -> bool:
        """Whether a table of the recipe named another component when the checkpoint was saved, whose state it has."""
        earlier, now = _use_in(facts.recipe, table), self._uses[table]
        if earlier is None or earlier.rpartition("/")[2] == now.rpartition("/")[2]:  # local code may have moved
            return False
        if self.world.is_main:
            log.warning("%s `%s` starts afresh: the checkpoint has the state of `%s`", ".".join(table), now, earlier)
        return True

    def fit(self) -> Literal["done", "stopped"]:
        """Trains to the end, or to a stop that all ranks agreed on; either way the last step is then saved.

        Raises Diverged when a gradient is not finite and the recipe says stop, CheckpointError when a checkpoint
        cannot be written and the recipe says stop or it is the last one, and whatever a component raises.
        """
        self._began = time.monotonic() - self.progress.seconds
        with self.stop:
            if self._saved is None and self._saves_first:
                self._save()
            while True:
                try:
                    self._train()
                    break
                except _GoBack as request:
                    self._go_back(request.bad)
                except Diverged:  # on all ranks alike: what is being saved is still good
                    self._settle()
                    raise
            self._settle(last=True)
        return "stopped" if "stop" in self._agreed and self.progress.step < self.end else "done"

    def _train(self) -> None:
        source = self.training.training(self.progress.step)
        alarms = self._alarms()
        self.replica.module.train()
        self._window.restart()
        ended = self.progress.step >= self.end
        if self._owes_evaluation():
            ended = self._evaluate_and_report(self.progress.step) or ended

        # The order is part of the contract: step, callbacks, log, evaluate, save. Callbacks come right after the
        # step because what they keep (averaged weights, say) belongs to the step that is evaluated and saved.
        while not ended:
            step = self.progress.step + 1
            logs = step == 1 or step == self.end or step % self.log_every == 0
            agrees = logs or step % self._agree_every == 0
            totals = self._step(step, source, measure=logs)

            if agrees or _looks_are_free(self.world.device):
                self._look_at_norms(totals, logs=logs)
            means = self._agree(totals if logs else {}, alarms) if agrees else {}
            rung = self._agreed if agrees else set()

            ended = self._report(step, means) or step == self.end or not rung.isdisjoint(("stop", "end"))
            evaluates, saves = self._must_evaluate(step, rung, ended=ended), self.save_cadence.due(step, rung)
            if evaluates or saves or ended:
                # What a bad step left behind is not evaluated, nor saved to go back to.
                self._look_at_norms(totals, logs=False)
            if evaluates:
                ended = self._evaluate_and_report(step) or ended
            if ended or saves or self._is_best(step):
                self._save(last=ended)

    def _alarms(self) -> list[Alarm]:
        """What happens by the clock. Only rank 0's counts; the others learn of it when ranks agree."""
        if not self.world.is_main:
            return []
        alarms = [cadence.alarm for cadence in self.cadences if cadence.alarm]
        if self.settings.length.is_time:
            alarms.append(Alarm("end", self.settings.length.seconds - self.progress.seconds))
        return alarms

    # ------------------------------------------------------------------------------------------ one step
    def _step(self, step: int, source: Iterator[MicroBatch], *, measure: bool) -> dict[str, Total]:
        """One optimizer step. Returns this rank's totals: the loss and, when `measure`, the task's metrics."""
        factor = self.schedule(step - 1)
        for group, rate in zip(self.optimizer.param_groups, self._base_rates, strict=True):
            group["lr"] = rate * factor

        first = next(source)
        micro_batches = _until_last(first, source)
        totals: dict[str, Total] = {}
        if step in self.progress.left_out:
            deque(micro_batches, maxlen=0)
        else:
            totals, norm = self._steps.train(step, first, micro_batches, measure=measure)
            self._norms.add(step, norm)
        self._read = first.read
        self.progress.step = step
        self.progress.samples += first.step_samples
        self._window.add(first.step_samples)
        return totals

    # ------------------------------------------------------------------------------------------ agreement
    def _agree(self, totals: Mapping[str, Total], alarms: Iterable[Alarm]) -> dict[str, float]:
        """One reduction over ranks: the means of `totals`, and whether anybody wants to stop or an alarm rang."""
        wishes = {"stop": self.stop.requested} | {alarm.name: alarm.rings() for alarm in alarms}
        known = ["stop", "end", *(cadence.key for cadence in self.cadences)]
        votes = {f"?{name}": Total(torch.tensor(float(wishes.get(name, False))), 1) for name in known}
        pace = {"?seconds": Total(torch.tensor(self._window.seconds / self._window.steps), 1)}
        saved = {"?saved": Total(torch.tensor(float(self.checkpoints.ready())), 1)}

        means = self.world.all.mean({**totals, **votes, **pace, **saved, **self._what_was_read()})
        self._refuse_another_stream(means)
        if means.pop("?saved") == 1.0:
            self._settle()
        self._agreed = {name for name in known if means.pop(f"?{name}") > 0}
        self._agree_every = max(1, min(1000, int(_AGREE_SECONDS / max(means.pop("?seconds"), 1e-9))))
        return means

    def _noted(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        for micro in micro_batches:
            self._read = micro.read
            yield micro

    def _what_was_read(self) -> dict[str, Total]:
        """A fingerprint of the stream, if there is one: the mean of squares is the square of the mean if all agree.

        Squares of 20 bits add up exactly in float64, on up to 8,192 ranks.
        """
        if not self._read:
            return {}
        powers = torch.tensor([self._read, self._read**2], dtype=torch.float64)
        return {f"?read{power}": Total(value, 1) for power, value in enumerate(powers, start=1)}

    def _refuse_another_stream(self, means: dict[str, float]) -> None:
        mean, square = means.pop("?read1", 0.0), means.pop("?read2", 0.0)
        if mean**2 != square:
            raise PluginError(
                f"ranks read different samples from the iterable dataset, by step {self.progress.step}: some would be "
                "used twice and others never",
                hints=[
                    "it must yield the same samples in the same order on every rank: do not shard it by rank, and do "
                    "not order by set or hash",
                    "shuffle with python's, numpy's or torch's own generator (seeded alike before each pass), or one "
                    "seeded from the epoch that `set_epoch` is told",
                ],
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

        goes_on = self.settings.on_nonfinite == "skip" and self._norms.nonfinite_in_a_row < _MOST_SKIPS
        if not (goes_on and logs and bad[-1] == self.progress.step):  # else the row of this step says it
            self._log_bad(bad[-1], totals)
        if self.settings.on_nonfinite == "rollback":
            raise _GoBack(bad)
        if not goes_on:
            raise Diverged(
                f"the gradient of step {bad[0]} is not finite; it was kept away from the weights",
                hints=[
                    "lower optimizer.lr, set train.clip_norm, or look at that step's samples",
                    'or let the run go on with train.on_nonfinite = "skip" or "rollback"',
                ],
            )
        log.warning("step %s: the gradient is not finite; left out", ", ".join(map(str, bad)))

    def _log_bad(self, step: int, totals: Mapping[str, Total]) -> None:
        """The log tells the truth about a bad step: its loss, where it is still at hand, and its norm."""
        means = self.world.all.mean(totals) if step == self.progress.step else {}
        row = {f"train/{name}": value for name, value in means.items()}
        self._log(step, {"samples": self.progress.samples, **row, "train/grad_norm": self._norms.newest})

    def _go_back(self, bad: list[int]) -> None:
        """Restores the newest checkpoint and leaves the bad steps out from now on."""
        self._rollbacks += 1
        self._settle()
        checkpoint = self.checkpoints.open()
        if checkpoint is None or self._rollbacks > _MOST_ROLLBACKS:
            raise Diverged(f"the gradient of step {bad[0]} is not finite, after {self._rollbacks - 1} rollbacks")
        left_out, skipped = self.progress.left_out | set(bad), self.progress.skipped
        self.restore(checkpoint)
        self.progress.left_out, self.progress.skipped = left_out, skipped
        self.tracker.rewind(self.progress.step)
        log.warning("step %d: the gradient is not finite; back to step %d", bad[0], self.progress.step)

    # ------------------------------------------------------------------------------------------ between steps
    def _report(self, step: int, means: dict[str, float]) -> bool:
        """Tells callbacks and tracker about the step; True when a callback wants the run to end."""
        if not means and not self.callbacks:
            return False
        lr = self.optimizer.param_groups[0]["lr"]
        row = self._row(means, lr) if means else {}
        seconds = self._window.seconds / max(1, self._window.steps)
        info = StepInfo(step=step, samples=self.progress.samples, lr=lr, seconds=seconds, metrics=row)

        with self.replica.weights.observing():
            wishes = [callback.on_step(info) for callback in self.callbacks.values()]
        if row:
            for callback in self.callbacks.values():
                row |= callback.on_log(info)
            self._log(step, row)
            self._window.restart()
        return any(wishes)

    def _row(self, means: dict[str, float], lr: float) -> dict[str, float]:
        row = {f"train/{name}": value for name, value in self.task.finish(means).items()}
        row |= {"train/grad_norm": self._norms.newest, "lr": lr, "samples": self.progress.samples}
        row["train/samples_per_second"] = self._window.samples / self._window.seconds
        if self.horizon.steps_per_epoch:
            row["epoch"] = self.progress.step / self.horizon.steps_per_epoch
        if self.progress.skipped:
            row["train/skipped_steps"] = self.progress.skipped
        return row

    def _log(self, step: int, row: Mapping[str, float]) -> None:
        self.metrics |= row
        self.tracker.log(step, row)

    def _must_evaluate(self, step: int, rung: set[str], *, ended: bool) -> bool:
        if self.evaluation is None or ("stop" in rung and step < self.end):
            return False  # whoever asked us to stop is waiting
        return ended or self.eval_cadence.due(step, rung)

    def _owes_evaluation(self) -> bool:
        step = self.progress.step
        if self.evaluation is None or step == 0 or self._evaluated == step:
            return False
        if step >= self.end:
            return True
        return not self.eval_cadence.alarm and self.eval_cadence.due(step, ())

    def _evaluate_and_report(self, step: int) -> bool:
        self._window.pause()
        row = self.evaluate()
        self._evaluated = step
        self._log(step, row)
        if self.saving.keep.best and self.saving.keep.by not in self.metrics and self.world.is_main:
            known = ", ".join(sorted(self.metrics))
            log.warning(
                "checkpoint.keep.by: no metric is called %s, so none is best; there are %s", self.saving.keep.by, known
            )
        with self.replica.weights.observing():
            wishes = [callback.on_eval(step, row) for callback in self.callbacks.values()]
        self._window.go_on()
        return any(wishes)

    def evaluate(self) -> dict[str, float]:
        """Means over the evaluation data, every sample counted once; names begin with `eval/`."""
        if self.evaluation is None:
            raise UsageError("the recipe has no [data.eval] to evaluate on")
        self.replica.sync_buffers()
        self.replica.module.eval()
        with self._evaluating(), torch.no_grad():
            totals = self._steps.evaluate(self._noted(self.evaluation.evaluation()))
            means = self.world.all.mean({**totals, **self._what_was_read()})
            self._refuse_another_stream(means)
        self.replica.module.train()
        return {f"eval/{name}": value for name, value in self.task.finish(means).items()}

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with ExitStack() as observed, ExitStack() as stack:
            with self.replica.weights.observing():
                for callback in self.callbacks.values():
                    stack.enter_context(callback.evaluating())
            try:
                yield
            finally:
                observed.enter_context(self.replica.weights.observing())  # which the callbacks leave within

    def _is_best(self, step: int) -> bool:
        if self._evaluated != step or not self.saving.keep.best:
            return False
        self._settle()  # what is being written is one to beat
        return self.checkpoints.is_best(self.metrics)

    def _save(self, *, last: bool = False) -> None:
        """Begins to save this step; see `_settle` for the end of it."""
        if self._saved == self.progress.step:
            return
        self._window.pause()
        self._settle()
        self.replica.sync_buffers()
        self.progress.seconds = time.monotonic() - self._began
        state = self.replica.state()
        facts = Facts(
            step=self.progress.step,
            samples=self.progress.samples,
            loop=dict(state.numbers),
            position=self.progress.to_json(),
            metrics=self._metrics_of(self.progress.step),
            **self.origin,
        )
        callbacks = {name: callback.state() for name, callback in self.callbacks.items()}
        self.checkpoints.save(facts, RankState.of(state, callbacks))
        self._saved = self.progress.step
        if not self.saving.background:
            self._settle(last=last)
        self._window.go_on()

    def _settle(self, *, last: bool = False) -> None:
        """Waits for the checkpoint that is being written, if there is one, and learns what came of it.

        Called on all ranks after the same step, so that they all go on or all stop.
        """
        if not self.checkpoints.pending:
            return
        assert self._saved is not None
        try:
            folder = self.checkpoints.wait()
        except CheckpointError as error:
            if last or self.saving.on_failure == "stop":
                raise
            log.warning("%s; training goes on without it", error.message)
            return
        for callback in self.callbacks.values():
            callback.on_checkpoint(self._saved, folder)

    def _metrics_of(self, step: int) -> dict[str, float]:
        """What is known of the weights at `step`; an older evaluation says nothing about them."""
        stale = () if self._evaluated == step else ("eval/",)
        return {name: value for name, value in self.metrics.items() if not name.startswith(stale)}


def _looks_are_free(device: torch.device) -> bool:
    """Whether reading a norm does not wait for the device."""
    return device.type == "cpu"


def _use_in(recipe: str, table: Sequence[str]) -> str | None:
    """What a table of a checkpoint's recipe uses; None where it does not say, as after an import."""
    try:
        found: Any = loads(recipe)
        for name in (*table, "use"):
            found = found[name]
    except (ValueError, KeyError, TypeError):
        return None
    return str(found)


def _until_last(first: MicroBatch, source: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
    """The micro-batches of one step, fetched one at a time."""
    micro = first
    while not micro.last:
        yield micro
        micro = next(source)
    yield micro
