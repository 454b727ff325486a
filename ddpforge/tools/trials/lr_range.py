"""Tests a range of learning rates in one short training: from rates that change nothing to rates that diverge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpforge.errors import Diverged, UsageError
from ddpforge.ranks import leaving
from ddpforge.ranks.arithmetic import settings_restored
from ddpforge.tools.trials.opening import opened, without_the_rest

__all__ = ["RangeTest", "lr_range", "smoothed", "suggested"]

_KEPT = 0.9  # of the running mean of losses, from one step to the next
_WORSE = 4.0  # times the best loss, where the test ends
_FIRST = 5  # steps before it may end
_ROWS = 12  # of the table
_WINDOWS = 20  # a loss is the mean of a twentieth of the steps on either side


@dataclass(frozen=True)
class RangeTest:
    """The training loss at each rate, a mean of its neighbourhood, and the rate at which it fell fastest, if it did.

    After L. Smith, Cyclical Learning Rates for Training Neural Networks, WACV 2017.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    suggestion: float | None
    is_main: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"lr": list(self.rates), "loss": list(self.losses), "suggestion": self.suggestion}

    def rows(self) -> list[tuple[str, str]]:
        """Some of the rates with their losses, for a table."""
        every = max(1, len(self.rates) // _ROWS)
        return [(f"{self.rates[n]:.2e}", f"{self.losses[n]:.4g}") for n in range(0, len(self.rates), every)]

    def verdict(self) -> str:
        """The suggestion for people."""
        if self.suggestion is None:
            return "the loss never fell: test lower rates with --from, or see `ddpforge run RECIPE --overfit 1`"
        lowest = self.rates[min(range(len(self.losses)), key=self.losses.__getitem__)]
        said = f"suggested optimizer.lr = {self.suggestion:.2g}, where the loss fell fastest"
        return f"{said}; it was lowest at {lowest:.2g}"


class _Sweep:
    """A schedule that takes rates from `low` to `high`, each the same factor above the one before."""

    base = 1.0  # the rate that is multiplied with what it returns

    def __init__(self, low: float, high: float, steps: int) -> None:
        self._low, self._factor = low, (high / low) ** (1 / (steps - 1))

    def __call__(self, step: int) -> float:
        rate: float = self._low * self._factor**step
        return rate / self.base


@leaving.nobody_leaves()
@settings_restored()
def lr_range(
    source: str | Path, *, low: float = 1e-7, high: float = 10.0, steps: int = 100, sets: Sequence[str] = ()
) -> RangeTest:
    """Trains a recipe for so many steps, each at a higher rate, up to where it diverges; called on every rank.

    Where groups or turns have rates of their own, these keep their proportion. Callbacks and evaluations are left out.
    Raises ForgeError as a run does.
    """
    if not 0 < low < high or steps < 2 * _FIRST:
        raise UsageError(
            f"cannot test {steps} rates from {low:g} to {high:g}",
            hints=[f"--from must be more than 0 and less than --to, and --steps {2 * _FIRST} or more"],
        )
    sweep = _Sweep(low, high, steps)
    sets = [*sets, "track.every=1st", "train.on_nonfinite=stop"]
    with opened(source, sets=sets, change=lambda dealt: without_the_rest(dealt, sweep)) as trial:
        sweep.base = trial.trainer.optimizer.param_groups[0]["lr"]
        if not sweep.base:
            raise UsageError("optimizer.lr is 0, and no factor makes another rate of it", hints=["set it to any other"])
        trial.trainer.end = steps
        seen = ((info.lr, info.metrics["train/loss"]) for info in trial.steps(steps))
        rates, losses = _until_worse(seen)
    means = smoothed(losses, max(1, steps // _WINDOWS))
    return RangeTest(rates, means, suggested(rates, means), trial.world.is_main)


def _until_worse(seen: Iterator[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """The rates and losses up to where a running mean of these is much worse than it was, or a loss not finite."""
    rates: list[float] = []
    losses: list[float] = []
    mean, best = 0.0, math.inf
    try:
        for number, (rate, loss) in enumerate(seen, start=1):
            mean = _KEPT * mean + (1 - _KEPT) * loss
            running = mean / (1 - _KEPT**number)  # without the zero that it began with
            best = min(best, running)
            if not math.isfinite(loss) or (number > _FIRST and running > _WORSE * best):
                break
            rates.append(rate)
            losses.append(loss)
    except Diverged:
        pass
    return rates, losses


def smoothed(losses: Sequence[float], reach: int) -> list[float]:
    """The mean of each loss and its neighbours on both sides: unlike a running mean it does not lag behind the rate."""
    found = []
    for n in range(len(losses)):
        near = min(reach, n, len(losses) - 1 - n)  # as far on either side
        window = losses[n - near : n + near + 1]
        found.append(sum(window) / len(window))
    return found


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """The rate at which the loss falls fastest, per factor of the rate; None where it falls nowhere.

    The slope is taken over two neighbours, up to the lowest loss: what comes after climbs.
    """
    lowest = min(range(len(losses)), key=losses.__getitem__, default=0)
    slopes = {
        rates[n]: (losses[n + 1] - losses[n - 1]) / math.log(rates[n + 1] / rates[n - 1])
        for n in range(1, min(lowest + 1, len(losses) - 1))
    }
    best = min(slopes, key=slopes.__getitem__, default=None)
    return best if best is not None and slopes[best] < 0 else None
