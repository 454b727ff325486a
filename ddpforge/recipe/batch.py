"""Plans how the global batch of a step is dealt out: ranks, forward passes and accumulation."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpforge.errors import Problem, RecipeError
from ddpforge.recipe.origins import Origin
from ddpforge.recipe.schema import TrainSection


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """One optimizer step, in samples: global_batch = micro_batch × accumulation × data_ranks."""

    global_batch: int
    micro_batch: int
    accumulation: int
    data_ranks: int

    def __str__(self) -> str:
        passes = f"{self.micro_batch} per forward pass × {self.accumulation} accumulation"
        return f"{self.global_batch} per step = {passes} × {_ranks(self.data_ranks)}"


def plan_batch(train: TrainSection, data_ranks: int, *, origin: Origin | None = None) -> BatchPlan:
    """Deals `train.global_batch` out to the `data_ranks` ranks that see different data.

    With `train.elastic_shards` it is dealt to so many shards first. Raises RecipeError, at `origin`, when it does not
    divide; the error lists the nearest batches, or numbers of ranks, that do.
    """
    shards = train.elastic_shards or data_ranks
    place = origin.place() if origin else None
    if shards % data_ranks:
        fits = ", ".join(str(ranks) for ranks in range(1, shards + 1) if shards % ranks == 0)
        message = f"`train.elastic_shards` = {shards} cannot be dealt out evenly to {_ranks(data_ranks)}"
        raise RecipeError([Problem(message, "train.elastic_shards", place, (f"numbers of ranks that fit: {fits}",))])
    batch, micro = train.global_batch, train.per_pass(data_ranks)
    if micro == 0 or batch % (micro * shards):
        problem = Problem(_indivisible(train, shards), "train.global_batch", place, tuple(_ways_out(train, shards)))
        raise RecipeError([problem])
    accumulation = batch // (micro * data_ranks)
    return BatchPlan(global_batch=batch, micro_batch=micro, accumulation=accumulation, data_ranks=data_ranks)


def _indivisible(train: TrainSection, data_ranks: int) -> str:
    batch, micro = train.global_batch, train.micro_batch
    if micro is None:
        return f"`train.global_batch` = {batch} cannot be dealt out evenly to {_dealt_to(train, data_ranks)}"
    if data_ranks == 1:
        return f"`train.micro_batch` = {micro} does not divide `train.global_batch` = {batch}"
    what = "`train.elastic_shards`" if train.elastic_shards else "ranks"
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
    return f"{count} elastic shards" if train.elastic_shards else _ranks(count)


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"
