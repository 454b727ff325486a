"""Checks of samplers: the samples of a step depend only on the step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ddpforge.interfaces import BatchSampler, EpochBatchSampler
from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, blame

_STEPS = 64


@check("whole-steps", "sampler")
def whole_steps(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that every step has at least one sample, and only samples of the data."""
    samples = len(case.given()["data"])
    for step, ids in enumerate(_steps(case, _build(case))):
        if not ids or not all(0 <= one < samples for one in ids):
            raise Breach(f"at least one sample of 0 to {samples - 1}", f"{ids} at step {step}", where=case.where)


@check("pure", "sampler")
def pure(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a step's samples are the same in any order of calls, and from a sampler that is built again."""
    order = _build(case)
    first = _steps(case, order)
    turns = random.Random(0).sample(range(_STEPS), _STEPS)
    for what, other in (("called again for the steps in another order", order), ("built again", _build(case))):
        for step in turns:
            if _at(case, other, step) != first[step]:
                raise Breach(
                    "a pure function of the step: no checkpoint saves its state, and a resume begins anywhere",
                    f"other samples at step {step} when {what}",
                    where=case.where,
                    hints=[
                        "compute the samples only from `step` and `seed`; keep no state, use no global random numbers"
                    ],
                )


@check("once-an-epoch", "sampler")
def once_an_epoch(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that no sample is repeated in an epoch if the order declares `once`."""
    order = _build(case)
    seen: dict[int, set[int]] = {}
    for step, ids in enumerate(_steps(case, order)):
        mine = seen.setdefault(order.epoch(step), set())
        if order.once and (len(set(ids)) < len(ids) or mine & set(ids)):
            raise Breach(
                "no sample twice in an epoch, because it declares `once = True`",
                f"a repeated sample at step {step}",
                where=case.where,
                hints=["remove `once`: random numbers for a sample then depend on the step, too"],
            )
        mine.update(ids)


@check("any-places", "sampler")
def any_places(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the sample at a place of an EpochBatchSampler does not depend on the other places in the call."""
    order = _build(case)
    if not isinstance(order, EpochBatchSampler):
        return
    steps = np.repeat(np.arange(4, dtype=np.uint64), [order.size(step) for step in range(4)])
    places = np.concatenate([np.arange(order.size(step), dtype=np.uint64) for step in range(4)])
    together = order.ids(steps, places)
    for mine in (np.arange(len(places))[::2], np.arange(len(places))[::-1]):
        if order.ids(steps[mine], places[mine]).tolist() != together[mine].tolist():
            raise Breach(
                "the sample at a place to depend only on that place",
                "other samples for other ranks",
                where=case.where,
                hints=["`at` must compute each element from its own epoch and place"],
            )


def _build(case: Case) -> BatchSampler:
    order = case.build(**case.given())
    if not isinstance(order, BatchSampler):
        raise Breach("a ddpforge.interfaces.BatchSampler", f"a {type(order).__name__}")
    return order


def _steps(case: Case, order: BatchSampler) -> list[list[int]]:
    return [_at(case, order, step) for step in range(_STEPS)]


def _at(case: Case, order: BatchSampler, step: int) -> list[int]:
    try:
        found: Any = np.asarray(order(step))
    except Exception as error:
        raise blame(error, f"the samples of step {step}", case.component) from error
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise Breach("a one-dimensional sequence of integers", f"{found!r} at step {step}", where=case.where)
    ids: list[int] = found.tolist()
    return ids
