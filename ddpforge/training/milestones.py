"""Evaluations and checkpoints of a run: the step of the newest of each, and their results."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from ddpforge.checkpoint.state import CheckpointMetadata
from ddpforge.errors import CheckpointError
from ddpforge.training.callback_calls import CallbackCalls
from ddpforge.training.checkpoint_saver import CheckpointSaver
from ddpforge.training.consensus import Consensus, EvaluationInterrupted
from ddpforge.training.evaluation import Evaluator
from ddpforge.training.features import Assembled, Feature, methods_of
from ddpforge.training.progress import Progress
from ddpforge.training.rows import RowBuilder

__all__ = ["Milestones"]

log = logging.getLogger("ddpforge")


class Milestones:
    """Evaluates and saves a run between two steps. Every method is called on all ranks.

    `evaluated` is the step of the newest evaluation, `saving.step` that of the newest checkpoint. `interrupted` is True
    if a stop interrupted an evaluation.
    """

    def __init__(
        self,
        run: Assembled,
        evaluator: Evaluator,
        saving: CheckpointSaver,
        rows: RowBuilder,
        calls: CallbackCalls,
        consensus: Consensus,
        features: Sequence[Feature],
    ) -> None:
        self.evaluator, self.saving = evaluator, saving
        self.evaluated: int | None = None
        self.interrupted = False
        self._keep, self._is_rank_zero = run.parts.recipe.checkpoint.keep, run.world.is_rank_zero
        self._rows, self._calls, self._consensus = rows, calls, consensus
        self._before_save = methods_of(features, "before_save")

    def restore(self, facts: CheckpointMetadata) -> None:
        """Continues from the checkpoint that has these facts."""
        self._rows.newest = dict(facts.metrics)
        self.saving.step = facts.step
        # A stop skips an evaluation that is due: the next attempt runs it first.
        self.evaluated = facts.step if any(name.startswith("eval/") for name in facts.metrics) else None

    def start(self, progress: Progress) -> None:
        """Starts to measure the wall time of the run."""
        self._began = time.monotonic() - progress.seconds

    def evaluate(self, progress: Progress) -> bool:
        """Evaluates the weights of this step, and logs the result; returns True if the run ends here.

        Raises an error of the evaluation, after the trained weights are saved if all ranks know of it.
        """
        step = progress.step
        self._rows.stopwatch.pause()
        try:
            row = self.evaluator.evaluate(step)
        except EvaluationInterrupted:  # the next attempt evaluates
            self.interrupted = True
            if not self._consensus.agreed.stops:  # no data came
                self._consensus.stop_now()
            return True
        except Exception:
            if self.evaluator.failed_together:
                self._rescue(progress)
            raise
        self.evaluated = step
        self._rows.log(step, row)
        if self._keep.best and self._keep.monitor not in self._rows.newest and self._is_rank_zero:
            log.warning(
                "checkpoint.keep.monitor: no metric is named %s, so no checkpoint is best; there are %s",
                *(self._keep.monitor, ", ".join(sorted(self._rows.newest))),
            )
        wishes = self._calls.on_eval(step, row)
        self._rows.stopwatch.resume()
        return any(self._calls.agreed("on_eval", wishes))

    def _rescue(self, progress: Progress) -> None:
        """Saves the trained weights before an error ends the run, on all ranks; logs an error of saving."""
        try:
            self.save(progress, last=True)
            self.saving.wait_for_pending(last=True)
            log.warning("the evaluation of step %d failed; the trained weights are saved", progress.step)
        except CheckpointError as error:
            log.warning("the evaluation of step %d failed, and saving too: %s", progress.step, error.message)

    def is_best(self, step: int) -> bool:
        """True if the evaluation of this step is better than that of every checkpoint."""
        return self.evaluated == step and self.saving.is_best(self._rows.newest)

    def save(self, progress: Progress, *, last: bool = False) -> None:
        """Begins to save this step, unless it is saved already."""
        if self.saving.step == progress.step:
            return
        self._rows.stopwatch.pause()
        self.saving.wait_for_pending()
        for before in self._before_save:
            before()
        progress.seconds = time.monotonic() - self._began
        stale = () if self.evaluated == progress.step else ("eval/",)  # metrics of an older evaluation
        metrics = {name: value for name, value in self._rows.newest.items() if not name.startswith(stale)}
        self.saving.save(progress, metrics, last=last)
        self._rows.stopwatch.resume()
