"""Rows of metrics of a run: averaged metrics, learning rates, speed, and the share of time by phase."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.interfaces import StepInfo, Total, Tracker
from ddpforge.ranks import heartbeat
from ddpforge.training.cadence import Stopwatch
from ddpforge.training.features import Assembled, Feature, methods_of
from ddpforge.training.learning_rates import Rates
from ddpforge.training.progress import Progress
from ddpforge.training.updates import finish_metrics, metric_name, reported_metrics, update_schedule

__all__ = ["RowBuilder", "TimeBreakdown"]

log = logging.getLogger("ddpforge")

_ITEMS = "?items"  # key of the items of a step
_TIME = "?time/"  # prefix of the name of a phase
_EMPTY = "?empty"  # key of the updates without a counted target since the last row
_MANY_EMPTY = 100  # steps in which no target counted, after which the run fails
_BETWEEN = (heartbeat.EVAL, heartbeat.SAVE)  # phases that do not happen between all rows
_WAITS, _LONG = 0.25, 5.0  # smallest share of waiting for data, and shortest window in seconds, for a hint


class TimeBreakdown:
    """Shares of wall time that a rank has spent in each phase since the last row, for one reduction over ranks.

    It is the time of the host: the host waits for a GPU when it reads a number, in `step` or `reduce`.
    """

    def __init__(self) -> None:
        self._advised = False
        self.restart()

    def restart(self) -> None:
        """Begins a new window."""
        self._began = heartbeat.seconds_by_phase()

    def totals(self, totals: Mapping[str, Total], *, counts: bool) -> dict[str, float]:
        """Returns this rank's shares, and restarts.

        `counts`: the task counts items that are not samples; the result then has the items of the step of `totals`.
        """
        passed = [now - before for now, before in zip(heartbeat.seconds_by_phase(), self._began, strict=True)]
        self.restart()
        whole = sum(passed) or 1.0
        found = {
            f"{_TIME}{name}": passed[phase] / whole
            for phase, name in enumerate(heartbeat.NAMES)
            if heartbeat.DATA <= phase < heartbeat.END and (passed[phase] or phase not in _BETWEEN)
        }
        if counts and "loss" in totals:
            found[_ITEMS] = float(totals["loss"].count)
        return found

    def advice(self, waited: float, seconds: float, *, workers: int) -> str:
        """Returns a hint, once, if a large share (`waited`) of `seconds` was spent waiting for data; otherwise ""."""
        if self._advised or waited < _WAITS or seconds < _LONG:
            return ""
        self._advised = True
        more = "more loader processes" if workers else "loader processes"
        return (
            f"{waited:.0%} of the time goes into waiting for data: set data.workers = {2 * workers or 2} ({more}, a "
            "core each), or let the dataset fetch a whole batch at once (`__getitems__`)"
        )

    @staticmethod
    def taken(means: dict[str, float]) -> tuple[dict[str, float], float | None]:
        """Removes the shares by phase, and the items of a step on a rank, from the means over ranks; returns both."""
        names = [name for name in means if name.startswith(_TIME)]
        return {name.removeprefix(_TIME): round(means.pop(name), 4) for name in names}, means.pop(_ITEMS, None)


class RowBuilder:
    """Builder of the row of a step, from means over all ranks and this rank's measurements since the last row.

    `newest` has the newest value of every metric in the rows that were logged, also in those of evaluations.
    """

    def __init__(self, run: Assembled, rates: Rates, tracker: Tracker, features: Sequence[Feature]) -> None:
        parts = run.parts
        self._world, self._task, self._plan, self._rates = run.world, parts.task, parts.plan, rates
        self._updates, self._workers = len(update_schedule(parts.updates)), parts.training.workers
        self._columns = methods_of(features, "row")
        self.tracker = tracker
        self.newest: dict[str, float] = {}
        self.stopwatch = Stopwatch()
        self.spending = TimeBreakdown()
        self._shares: Mapping[str, float] = {}  # of wall time since the row before the newest, by phase
        self._items: float | None = None  # items of a rank in a step; None if they are samples
        self._empty, self._first_step = 0.0, 0  # updates without a counted target, since `_first_step`

    def restart(self, step: int) -> None:
        """Begins to measure after `step`."""
        self._empty, self._first_step = 0.0, step
        self.stopwatch.restart()
        self.spending.restart()

    def totals(self, totals: Mapping[str, Total], *, counts: bool, empty: Tensor | float) -> dict[str, Total | float]:
        """Returns the numbers for the row of a step that are reduced together with its `totals`.

        `counts`: the task counts items that are not samples; `empty`: in this number of steps it counted none.
        """
        riding: dict[str, Total | float] = {**self.spending.totals(totals, counts=counts)} if totals else {}
        return riding | ({_EMPTY: Total(torch.as_tensor(empty), 1)} if counts else {})

    def take(self, means: dict[str, float], progress: Progress, end: float) -> None:
        """Moves the means of `totals` from `means` into this builder; raises UsageError if no target ever counted."""
        self._check_targets(means.pop(_EMPTY, 0.0), progress.step, end)
        shares, items = TimeBreakdown.taken(means)
        if shares:
            self._shares, self._items = shares, items

    def _check_targets(self, empty: float, step: int, end: float) -> None:
        """Logs the number of steps in which no target counted, as it grows; raises UsageError if none ever counted."""
        if not empty:
            return
        before, self._empty = self._empty, self._empty + empty
        steps = step - self._first_step
        epoch = self._plan.horizon.steps_per_epoch or float("inf")
        if self._empty >= steps * self._updates and (
            steps >= _MANY_EMPTY or (self._first_step == 0 and step >= min(end, epoch))
        ):
            raise UsageError(
                f"no target has counted in {steps} steps: the model learns nothing",
                hints=[
                    "look at the targets of the dataset (`ddpforge data show`): all have the ignored value, or "
                    "truncation has cut them off"
                ],
            )
        if before == 0 or int(self._empty).bit_length() > int(before).bit_length():
            log.warning(
                "by step %d no target counted in %d of %d updates: their gradient is zero, and only the optimizer's "
                "momentum and weight decay change the weights",
                *(step, self._empty, steps * self._updates),
            )

    def info(self, means: Mapping[str, float], progress: Progress, grad_norm: float) -> StepInfo:
        """Returns the description of the current step, for callbacks; with a row, if there are `means`."""
        lr = self._rates.optimizer.param_groups[0]["lr"]
        row = self._row(means, progress, lr=lr, grad_norm=grad_norm) if means else {}
        seconds = self.stopwatch.seconds / max(1, self.stopwatch.steps)
        return StepInfo(step=progress.step, samples=progress.samples, lr=lr, seconds=seconds, metrics=row)

    def _row(self, means: Mapping[str, float], progress: Progress, *, lr: float, grad_norm: float) -> dict[str, float]:
        row = {f"train/{name}": value for name, value in finish_metrics(self._task, means).items()}
        row |= {"train/grad_norm": grad_norm, "lr": lr, "samples": progress.samples}
        row |= {metric_name("lr", name): rate for name, rate in self._rates.named().items()}
        row |= self._rates.scheduled()
        watch = self.stopwatch
        row["train/samples_per_second"] = watch.samples / watch.seconds
        if self._items is not None:
            per_second = self._items * self._world.dp_ranks.size * watch.steps / watch.seconds
            row[f"train/{self._task.items}_per_second"] = per_second
        row |= {f"train/time/{phase}": share for phase, share in self._shares.items()}
        if per_epoch := self._plan.horizon.steps_per_epoch:
            row["epoch"] = progress.step / per_epoch
        if progress.nonfinite_steps:
            row["train/skipped_steps"] = progress.nonfinite_steps
        for columns in self._columns:
            row |= columns(progress.step)
        return row

    def log(self, step: int, row: Mapping[str, float]) -> None:
        """Passes a row to the tracker."""
        self.newest |= row
        self.tracker.log(step, row)

    def log_nonfinite(self, totals: Mapping[str, Total], progress: Progress, step: int, grad_norm: float) -> None:
        """Logs a step whose gradient is not finite: its norm and, if it is the current step, its loss. Collective."""
        ranks, current = self._world.global_ranks, step == progress.step
        means = ranks.reduce_metrics(totals, reported_metrics(self._task)) if current else {}
        row = {f"train/{name}": value for name, value in means.items()}
        self.log(step, {"samples": progress.samples, **row, "train/grad_norm": grad_norm})

    def finish_window(self, step: int) -> None:
        """Begins the window of the next row; logs a hint, once, if much of the last one was spent waiting for data."""
        waited = self._shares.get(heartbeat.NAMES[heartbeat.DATA], 0.0)
        if advice := self.spending.advice(waited, self.stopwatch.seconds, workers=self._workers):
            log.warning("step %d: %s", step, advice)
        self.stopwatch.restart()
