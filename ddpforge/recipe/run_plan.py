"""Plans a run: the division of its batch among ranks and passes, its length in steps, and its cadences."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from ddpforge.errors import Diagnostic, RecipeError, UsageError
from ddpforge.interfaces.durations import Duration, Horizon
from ddpforge.recipe.schema import Recipe, TrainSection
from ddpforge.recipe.toml import Origin

__all__ = ["RunPlan", "StepWindow", "in_steps", "no_sampler_of_streams"]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One optimizer step, in samples: global_batch = micro_batch × accumulation × data_ranks.

    With `max_tokens`, `micro_batch` is the largest number of samples, and `accumulation` that of the first step.
    """

    global_batch: int
    micro_batch: int
    accumulation: int
    data_ranks: int
    max_tokens: int | None = None

    def __str__(self) -> str:
        if self.max_tokens:
            most = f"at most {self.max_tokens:,} tokens per forward pass"
            return f"{self.global_batch} per step, {most} × {_ranks(self.data_ranks)}"
        passes = f"{self.micro_batch} per forward pass × {self.accumulation} accumulation"
        return f"{self.global_batch} per step = {passes} × {_ranks(self.data_ranks)}"


def plan_batch(train: TrainSection, data_ranks: int, *, origin: Origin | None = None) -> BatchPlan:
    """Divides `train.global_batch` among the `data_ranks` ranks that see different data.

    With `train.virtual_ranks` it is first divided among these virtual ranks. Raises RecipeError, at `origin`, if it
    cannot be divided evenly; the error lists the nearest batches or numbers of ranks that fit.
    """
    shards = train.virtual_ranks or data_ranks
    place = origin.place() if origin else None
    if shards % data_ranks:
        fits = ", ".join(str(ranks) for ranks in range(1, shards + 1) if shards % ranks == 0)
        message = f"`train.virtual_ranks` = {shards} cannot be divided evenly among {_ranks(data_ranks)}"
        raise RecipeError([Diagnostic(message, "train.virtual_ranks", place, (f"numbers of ranks that fit: {fits}",))])
    batch, micro = train.global_batch, train.per_pass(data_ranks)
    if micro == 0 or batch % (micro * shards):
        problem = Diagnostic(_indivisible(train, shards), "train.global_batch", place, tuple(_ways_out(train, shards)))
        raise RecipeError([problem])
    accumulation = batch // (micro * data_ranks)
    return BatchPlan(
        global_batch=batch,
        micro_batch=micro,
        accumulation=accumulation,
        data_ranks=data_ranks,
        max_tokens=train.max_tokens,
    )


def _indivisible(train: TrainSection, data_ranks: int) -> str:
    batch, micro = train.global_batch, train.micro_batch
    if micro is None:
        return f"`train.global_batch` = {batch} cannot be divided evenly among {_dealt_to(train, data_ranks)}"
    if data_ranks == 1:
        return f"`train.micro_batch` = {micro} does not divide `train.global_batch` = {batch}"
    what = "`train.virtual_ranks`" if train.virtual_ranks else "ranks"
    unit = f"`train.micro_batch` × {what} = {micro} × {data_ranks} = {micro * data_ranks}"
    return f"`train.global_batch` = {batch} is not a multiple of {unit}"


def _ways_out(train: TrainSection, data_ranks: int) -> list[str]:
    batch, micro = train.global_batch, train.micro_batch
    unit = (micro or 1) * data_ranks
    below, above = batch // unit * unit, (batch // unit + 1) * unit
    ways = [f"nearest global_batch: {_either(below, above)}" + (f", with micro_batch = {micro}" if micro else "")]

    per_rank, rest = divmod(batch, data_ranks)
    if micro and not rest:
        small = [one for one in range(1, math.isqrt(per_rank) + 1) if per_rank % one == 0]
        divisors = sorted({*small, *(per_rank // one for one in small)})
        below = max((one for one in divisors if one < micro), default=0)
        above = min((one for one in divisors if one > micro), default=0)
        ways.append(f"nearest micro_batch: {_either(below, above)}, with global_batch = {batch}")
    return ways


def _either(*choices: int) -> str:
    return " or ".join(str(choice) for choice in choices if choice)


def _dealt_to(train: TrainSection, count: int) -> str:
    return f"{count} virtual ranks" if train.virtual_ranks else _ranks(count)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


_WINDOW = re.compile(r"(\d+)(?:\.\.(\d+))?(,all)?")


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Plan of a run in samples and steps, computed once.

    `every` maps keys of the recipe ("track.every") to steps; it has no wall-clock cadences.
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
    ) -> RunPlan | None:
        """Builds the plan of a recipe; returns None if `noting` has suppressed an error of the length.

        Raises UsageError for a duration that cannot be converted to steps.

        Args:
            steps_per_epoch: None for a stream of unknown length, or if epochs differ in length
            noting: context manager around the conversion of each key, called with its path; may suppress the error
            ends: returns the total steps of the first N epochs if epochs differ in length, else None
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
        """Returns the numbers for the record of a run."""
        return {
            "total_steps": self.horizon.total,
            "steps_per_epoch": self.horizon.steps_per_epoch,
            "micro_batch": self.batch.micro_batch,
            "accumulation": self.batch.accumulation,
        }


@dataclass(frozen=True)
class StepWindow:
    """Window of steps to profile, from `first` to `last` inclusive: on rank 0, or on `all` ranks."""

    first: int
    last: int
    all: bool = False

    @classmethod
    def parse(cls, text: str) -> StepWindow:
        """Parses "20..25", "20" or "20..25,all"; raises UsageError for any other text."""
        match = _WINDOW.fullmatch(str(text))
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise UsageError(
                f"the window of the profile, {text}, has no steps",
                hints=['expected e.g. "20..25", or "20..25,all" for all ranks'],
            )
        return cls(int(match[1]), int(match[2] or match[1]), bool(match[3]))

    def reject_after(self, total: int | None) -> None:
        """Raises UsageError if a run of `total` steps ends before the window begins."""
        if total is not None and self.first > total:
            raise UsageError(
                f"the window of the profile begins at step {self.first}, but the run ends at step {total}",
                hints=["name earlier steps, or set a longer train.length"],
            )


def in_steps(key: str, duration: Duration, horizon: Horizon) -> int:
    """Converts `duration`, the value of the recipe's `key`, to steps; raises UsageError if it cannot be converted."""
    try:
        return horizon.steps(duration)
    except ValueError as error:
        raise UsageError(f"{key}: {error}", hints=[f'write {key} in steps, e.g. "500st"']) from None


def _end(length: Duration, ends: Callable[[int], int | None]) -> int | None:
    """Returns the step at which `length`, whole epochs that differ in length, ends; None if it is not known."""
    return ends(int(length.value)) if length.unit == "ep" and length.value.is_integer() else None


def _cadences(recipe: Recipe) -> Iterator[tuple[tuple[str, ...], Duration]]:
    """Yields the cadences in steps or epochs, with the paths of their keys."""
    found: dict[tuple[str, ...], Duration] = {
        ("track", "every"): recipe.track.every,
        ("checkpoint", "every"): recipe.checkpoint.every,
    }
    if recipe.checkpoint.keep.every:
        found["checkpoint", "keep", "every"] = recipe.checkpoint.keep.every
    if recipe.data.evaluations:
        found["train", "eval_every"] = recipe.train.eval_every
    yield from ((path, duration) for path, duration in found.items() if not duration.is_time)


def no_sampler_of_streams(stream: type) -> UsageError:
    """Returns the error for a [data.sampler] of data that is a stream."""
    return UsageError(
        f"{stream.__name__} is an iterable dataset and yields samples in its own order",
        hints=["remove [data.sampler], or use a dataset with __len__ and __getitem__"],
        key="data.sampler",
    )
