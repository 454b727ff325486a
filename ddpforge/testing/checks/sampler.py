"""Checks of samplers: every step is a choice of samples that nothing but the step decides."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ddpforge.interfaces import BatchSampler, EpochBatchSampler
from ddpforge.testing.cases import Case
from ddpforge.testing.register import check
from ddpforge.testing.report import Breach, blame
from ddpforge.testing.worlds import Worlds

_STEPS = 64


@check("whole-steps", "sampler")
def whole_steps(case: Case, worlds: Worlds) -> None:
    """Every step holds at least one sample, and only such as the data has."""
    samples = len(case.given()["data"])
    for step, ids in enumerate(_steps(case, _build(case))):
        if not ids or not all(0 <= one < samples for one in ids):
            raise Breach(f"at least one sample of 0 to {samples - 1}", f"{ids} at step {step}", where=case.where)


@check("pure", "sampler")
def pure(case: Case, worlds: Worlds) -> None:
    """A step's samples are the same in any order, any number of times, and from a sampler that was built again."""
    order = _build(case)
    first = _steps(case, order)
    turns = random.Random(0).sample(range(_STEPS), _STEPS)
    for what, other in (("asked again in another order", order), ("built again", _build(case))):
        for step in turns:
            if _at(case, other, step) != first[step]:
                raise Breach(
                    "a pure function of the step: nothing of a sampler is saved, and a resume begins in its middle",
                    f"other samples at step {step} when {what}",
                    where=case.where,
                    hints=["work the samples out from `step` and `seed` alone; keep no state, draw no random numbers"],
                )


@check("once-an-epoch", "sampler")
def once_an_epoch(case: Case, worlds: Worlds) -> None:
    """No sample comes twice in an epoch, where `once` says so."""
    order = _build(case)
    seen: dict[int, set[int]] = {}
    for step, ids in enumerate(_steps(case, order)):
        mine = seen.setdefault(order.epoch(step), set())
        if order.once and (len(set(ids)) < len(ids) or mine & set(ids)):
            raise Breach(
                "no sample twice in an epoch, as `once = True` promises",
                f"one that was there before at step {step}",
                where=case.where,
                hints=["leave `once` out: what is drawn for a sample then differs from step to step"],
            )
        mine.update(ids)


@check("any-places", "sampler")
def any_places(case: Case, worlds: Worlds) -> None:
    """An EpochBatchSampler gives a rank's places alone what it gives all places together."""
    order = _build(case)
    if not isinstance(order, EpochBatchSampler):
        return
    steps = np.repeat(np.arange(4, dtype=np.uint64), [order.size(step) for step in range(4)])
    places = np.concatenate([np.arange(order.size(step), dtype=np.uint64) for step in range(4)])
    together = order.ids(steps, places)
    for mine in (np.arange(len(places))[::2], np.arange(len(places))[::-1]):
        if order.ids(steps[mine], places[mine]).tolist() != together[mine].tolist():
            raise Breach(
                "the sample at a place to depend on that place alone",
                "other samples for other ranks",
                where=case.where,
                hints=["`at` works element by element: each epoch and place has its sample"],
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
        raise Breach("a row of whole numbers", f"{found!r} at step {step}", where=case.where)
    ids: list[int] = found.tolist()
    return ids
