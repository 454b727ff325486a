"""A run in numbers, known before a rank trains: batches, length, and how often what happens. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ddpforge.errors import UsageError
from ddpforge.interfaces.durations import Duration, Horizon
from ddpforge.recipe.batch import BatchPlan
from ddpforge.recipe.schema import Recipe

__all__ = ["Plan", "Window", "in_steps"]

_WINDOW = re.compile(r"(\d+)(?:\.\.(\d+))?(,all)?")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a run: made once by arithmetic, read by whoever counts samples or steps.

    `every` maps keys of the recipe ("track.every") to steps; what goes by the clock is not in it.
    """

    batch: BatchPlan
    horizon: Horizon
    every: Mapping[str, int]

    @classmethod
    def of(
        cls,
        recipe: Recipe,
        batch: BatchPlan,
        steps_per_epoch: int | None,
        *,
        noting: Callable[..., AbstractContextManager[Any]] = lambda *path: nullcontext(),
        ends: Callable[[int], int | None] = lambda epochs: None,
    ) -> Plan | None:
        """The plan of a recipe, for data of so many steps per epoch: None for a stream without a length.

        Where epochs have no one length, `ends` tells how many steps the first so many take together. Raises UsageError
        for a duration that cannot be counted. `noting` wraps the counting of each key, which it is given as a path, and
        may keep the error for later: there is no plan then where the length cannot be counted.
        """
        counted = Horizon(None, steps_per_epoch)
        horizon, every = None, {}
        with noting("train", "length"):
            length = recipe.train.length
            total = None if length.is_time else _end(length, ends) or in_steps("train.length", length, counted)
            horizon = Horizon(total, steps_per_epoch)
        for path, duration in _cadences(recipe):
            with noting(*path):
                every[".".join(path)] = in_steps(".".join(path), duration, horizon or counted)
        return None if horizon is None else cls(batch=batch, horizon=horizon, every=every)

    def facts(self) -> dict[str, Any]:
        """The numbers that a run's record has of it."""
        return {
            "total_steps": self.horizon.total,
            "steps_per_epoch": self.horizon.steps_per_epoch,
            "micro_batch": self.batch.micro_batch,
            "accumulation": self.batch.accumulation,
        }


@dataclass(frozen=True)
class Window:
    """Steps from `first` to `last`, both included, that are looked at: on the main rank, or on `all`."""

    first: int
    last: int
    all: bool = False

    @classmethod
    def parse(cls, text: str) -> Window:
        """The window that "20..25", "20" or "20..25,all" names; raises UsageError for another text."""
        match = _WINDOW.fullmatch(text)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise UsageError(
                f"--profile {text} names no steps", hints=['expected e.g. "20..25", or "20..25,all" for all ranks']
            )
        return cls(int(match[1]), int(match[2] or match[1]), bool(match[3]))

    def refuse_after(self, total: int | None) -> None:
        """Raises UsageError where a run of `total` steps is over before it begins."""
        if total is not None and self.first > total:
            raise UsageError(
                f"--profile begins at step {self.first}, and the run ends at step {total}",
                hints=["name earlier steps, or set a longer train.length"],
            )


def in_steps(key: str, duration: Duration, horizon: Horizon) -> int:
    """`duration`, the value of the recipe's `key`, in steps; raises UsageError where the data has no epochs."""
    try:
        return horizon.steps(duration)
    except ValueError as error:
        raise UsageError(f"{key}: {error}", hints=[f'write {key} in steps, e.g. "500st"']) from None


def _end(length: Duration, ends: Callable[[int], int | None]) -> int | None:
    """The step at which so many whole epochs are over, where it is known though they have no one length."""
    return ends(int(length.value)) if length.unit == "ep" and length.value.is_integer() else None


def _cadences(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], Duration]]:
    """Yields the durations of what happens every so many steps, with the paths of their keys."""
    found: dict[tuple[str, ...], Duration] = {
        ("track", "every"): recipe.track.every,
        ("checkpoint", "every"): recipe.checkpoint.every,
    }
    if recipe.checkpoint.keep.every:
        found["checkpoint", "keep", "every"] = recipe.checkpoint.keep.every
    if recipe.data.evaluations:
        found["train", "eval_every"] = recipe.train.eval_every
    yield from ((path, duration) for path, duration in found.items() if not duration.is_time)
