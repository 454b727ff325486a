"""Tests a range of learning rates in one short training: from rates that change nothing to rates that diverge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpforge.api import restored_backend_flags
from ddpforge.errors import Diverged, UsageError
from ddpforge.ranks import process_exit
from ddpforge.tools.trials.ephemeral_run import open_ephemeral, without_the_rest

__all__ = ["RangeTest", "lr_range", "smoothed", "suggested"]

_KEPT = 0.9  # share of the running mean of losses that the next step keeps
_WORSE = 4.0  # the test ends if the running mean is this many times its best value
_FIRST = 5  # steps before the test may end
_ROWS = 12  # rows of the table
_WINDOWS = 20  # a loss is averaged with a twentieth of the steps on either side


@dataclass(frozen=True)
class RangeTest:
    """Smoothed training loss at each rate, and the rate at which the loss fell fastest; None if it never fell.

    After L. Smith, Cyclical Learning Rates for Training Neural Networks, WACV 2017.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    suggestion: float | None
    is_rank_zero: bool

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        return {"lr": list(self.rates), "loss": list(self.losses), "suggestion": self.suggestion}

    def rows(self) -> list[tuple[str, str]]:
        """Returns some of the rates with their losses, for a table."""
        every = max(1, len(self.rates) // _ROWS)
        return [(f"{self.rates[n]:.2e}", f"{self.losses[n]:.4g}") for n in range(0, len(self.rates), every)]

    def verdict(self) -> str:
        """Returns the suggestion as text."""
        if self.suggestion is None:
            return "the loss never fell: test lower rates with --from, or see `ddpforge run RECIPE --overfit 1`"
        lowest = self.rates[min(range(len(self.losses)), key=self.losses.__getitem__)]
        said = f"suggested optimizer.lr = {self.suggestion:.2g}: at this rate the loss fell fastest"
        return f"{said}; it was lowest at {lowest:.2g}"


class _Sweep:
    """Schedule of rates from `low` to `high`, each larger than the one before by the same factor."""

    base = 1.0  # the rate that the returned factor multiplies

    def __init__(self, low: float, high: float, steps: int) -> None:
        self._low, self._factor = low, (high / low) ** (1 / (steps - 1))

    def __call__(self, step: int) -> float:
        rate: float = self._low * self._factor**step
        return rate / self.base


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def lr_range(
    source: str | Path, *, low: float = 1e-7, high: float = 10.0, steps: int = 100, sets: Sequence[str] = ()
) -> RangeTest:
    """Trains a recipe for `steps` steps, each at a higher rate, until it diverges; called on every rank.

    Rates of parameter groups or alternating updates keep their proportion. Callbacks and evaluations are skipped.
    Raises ForgeError as a run does.
    """
    if not 0 < low < high or steps < 2 * _FIRST:
        raise UsageError(
            f"cannot test {steps} rates from {low:g} to {high:g}",
            hints=[f"--from must be more than 0 and less than --to, and --steps {2 * _FIRST} or more"],
        )
    sweep = _Sweep(low, high, steps)
    sets = [*sets, "track.every=1st", "train.on_nonfinite=stop"]
    with open_ephemeral(source, sets=sets, change=lambda dealt: without_the_rest(dealt, sweep)) as trial:
        sweep.base = trial.trainer.optimizer.param_groups[0]["lr"]
        if not sweep.base:
            raise UsageError("optimizer.lr is 0, so no factor can change it", hints=["set it to any other value"])
        trial.trainer.end = steps
        seen = ((info.lr, info.metrics["train/loss"]) for info in trial.steps(steps))
        rates, losses = _until_worse(seen)
    means = smoothed(losses, max(1, steps // _WINDOWS))
    return RangeTest(rates, means, suggested(rates, means), trial.world.is_rank_zero)


def _until_worse(seen: Iterator[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Returns rates and losses, until a running mean of losses is much worse than its best, or a loss not finite."""
    rates: list[float] = []
    losses: list[float] = []
    mean, best = 0.0, math.inf
    try:
        for number, (rate, loss) in enumerate(seen, start=1):
            mean = _KEPT * mean + (1 - _KEPT) * loss
            running = mean / (1 - _KEPT**number)  # without the initial zero
            best = min(best, running)
            if not math.isfinite(loss) or (number > _FIRST and running > _WORSE * best):
                break
            rates.append(rate)
            losses.append(loss)
    except Diverged:
        pass
    return rates, losses


def smoothed(losses: Sequence[float], reach: int) -> list[float]:
    """Returns the mean of each loss and up to `reach` neighbors on either side."""
    found = []  # unlike a running mean, it does not lag behind the rate
    for n in range(len(losses)):
        near = min(reach, n, len(losses) - 1 - n)  # the same on either side
        window = losses[n - near : n + near + 1]
        found.append(sum(window) / len(window))
    return found


def suggested(rates: Sequence[float], losses: Sequence[float]) -> float | None:
    """Returns the rate at which the loss falls fastest per factor of the rate; None if it never falls.

    The slope is between both neighbors of a rate. Rates beyond the lowest loss are ignored.
    """
    lowest = min(range(len(losses)), key=losses.__getitem__, default=0)
    slopes = {
        rates[n]: (losses[n + 1] - losses[n - 1]) / math.log(rates[n + 1] / rates[n - 1])
        for n in range(1, min(lowest + 1, len(losses) - 1))
    }
    best = min(slopes, key=slopes.__getitem__, default=None)
    return best if best is not None and slopes[best] < 0 else None
