"""The rows of numbers of a run: averaged metrics, rates, speed, and the time between two rows by phase."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.interfaces import Task, Total, World
from ddpforge.ranks import phases
from ddpforge.recipe.plan import Plan
from ddpforge.training.cadence import Stopwatch
from ddpforge.training.learning_rates import Rates
from ddpforge.training.progress import Progress
from ddpforge.training.turns import finished, of_turn

__all__ = ["RowBuilder", "Spending"]

log = logging.getLogger("ddpforge")

_ITEMS = "?items"  # of a step
_TIME = "?time/"  # and the name of a phase
_EMPTY = "?empty"  # the steps since the last row in which no target counted
_MANY_EMPTY = 100  # steps, all of them so, after which nothing will ever be learnt
_BETWEEN = (phases.EVAL, phases.SAVE)  # what does not happen between all rows
_WAITS, _LONG = 0.25, 5.0  # the share of the time, and seconds, of which waiting for data is worth a word


class Spending:
    """The shares of wall time that a rank has spent in each phase since the last row, for one reduction over ranks.

    It is the time of the host: one that waits for a GPU waits where it reads a number, in `step` or `reduce`.
    """

    def __init__(self) -> None:
        self._advised = False
        self.restart()

    def restart(self) -> None:
        """Begins a new window."""
        self._began = phases.spent()

    def totals(self, totals: Mapping[str, Total], *, counts: bool) -> dict[str, float]:
        """Returns this rank's shares, and restarts.

        `counts` says that the task counts items which are not samples: then also those in the step of these `totals`.
        """
        passed = [now - before for now, before in zip(phases.spent(), self._began, strict=True)]
        self.restart()
        whole = sum(passed) or 1.0
        found = {
            f"{_TIME}{name}": passed[phase] / whole
            for phase, name in enumerate(phases.NAMES)
            if phases.DATA <= phase < phases.END and (passed[phase] or phase not in _BETWEEN)
        }
        if counts and "loss" in totals:
            found[_ITEMS] = float(totals["loss"].count)
        return found

    def advice(self, waited: float, seconds: float, *, workers: int) -> str:
        """Says, once, what to do where a share of so many seconds went into waiting for data; empty otherwise."""
        if self._advised or waited < _WAITS or seconds < _LONG:
            return ""
        self._advised = True
        more = "more loader processes" if workers else "loader processes"
        return (
            f"{waited:.0%} of the time goes into waiting for data: set data.workers = {2 * workers or 2} ({more}, a "
            "core each), or have the dataset fetch a batch at once (`__getitems__`)"
        )

    @staticmethod
    def taken(means: dict[str, float]) -> tuple[dict[str, float], float | None]:
        """Takes the shares by phase, and the items of a step on one rank, out of the means over all ranks."""
        names = [name for name in means if name.startswith(_TIME)]
        return {name.removeprefix(_TIME): round(means.pop(name), 4) for name in names}, means.pop(_ITEMS, None)


class RowBuilder:
    """Builds the row of a step out of means over all ranks, and what this rank has measured since the last row."""

    def __init__(self, world: World, task: Task, plan: Plan, rates: Rates, updates: int) -> None:
        """`updates` is the number of updates that a step makes."""
        self._world, self._task, self._plan, self._rates, self._updates = world, task, plan, rates, updates
        self.stopwatch = Stopwatch()
        self.spending = Spending()
        self._shares: Mapping[str, float] = {}  # of wall time since the row before the newest, by phase
        self._items: float | None = None  # that a rank has in a step; None if they are samples
        self._empty, self._first_step = 0.0, 0  # steps in which no target counted, of those after `_first_step`

    def restart(self, step: int) -> None:
        """Begins to measure after `step`."""
        self._empty, self._first_step = 0.0, step
        self.stopwatch.restart()
        self.spending.restart()

    def totals(self, totals: Mapping[str, Total], *, counts: bool, empty: Tensor | float) -> dict[str, Total | float]:
        """Returns what rides on the reduction of a step's `totals` for its row.

        `counts` says that the task counts items which are not samples, and `empty` of how many steps it counted none.
        """
        riding: dict[str, Total | float] = {**self.spending.totals(totals, counts=counts)} if totals else {}
        return riding | ({_EMPTY: Total(torch.as_tensor(empty), 1)} if counts else {})

    def take(self, means: dict[str, float], progress: Progress, end: float) -> None:
        """Takes out of `means` what `totals` gave; raises UsageError if no target has ever counted."""
        self._check_targets(means.pop(_EMPTY, 0.0), progress.step, end)
        shares, items = Spending.taken(means)
        if shares:
            self._shares, self._items = shares, items

    def _check_targets(self, empty: float, step: int, end: float) -> None:
        """Logs in how many steps since the last row no target counted; raises UsageError if none ever did."""
        if not empty:
            return
        before, self._empty = self._empty, self._empty + empty
        steps = step - self._first_step
        epoch = self._plan.horizon.steps_per_epoch or float("inf")
        if self._empty >= steps * self._updates and (
            steps >= _MANY_EMPTY or (self._first_step == 0 and step >= min(end, epoch))
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
                *(step, self._empty, steps),
            )

    def row(self, means: Mapping[str, float], progress: Progress, *, lr: float, grad_norm: float) -> dict[str, float]:
        """Returns the row of the step that `progress` has come to."""
        row = {f"train/{name}": value for name, value in finished(self._task, means).items()}
        row |= {"train/grad_norm": grad_norm, "lr": lr, "samples": progress.samples}
        row |= {of_turn("lr", name): rate for name, rate in self._rates.named().items()}
        watch = self.stopwatch
        row["train/samples_per_second"] = watch.samples / watch.seconds
        if self._items is not None:
            per_second = self._items * self._world.data.size * watch.steps / watch.seconds
            row[f"train/{self._task.items}_per_second"] = per_second
        row |= {f"train/time/{phase}": share for phase, share in self._shares.items()}
        if per_epoch := self._plan.horizon.steps_per_epoch:
            row["epoch"] = progress.step / per_epoch
        if progress.skipped:
            row["train/skipped_steps"] = progress.skipped
        return row

    def finish_window(self, step: int, *, workers: int) -> None:
        """Begins the window of the next row; logs once if much of the last one went into waiting for data."""
        waited = self._shares.get(phases.NAMES[phases.DATA], 0.0)
        if advice := self.spending.advice(waited, self.stopwatch.seconds, workers=workers):
            log.warning("step %d: %s", step, advice)
        self.stopwatch.restart()
