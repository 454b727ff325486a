"""Slow ranks of a run by the time at which each arrives at the reduction of gradients, without options."""

from __future__ import annotations

import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median_low
from time import perf_counter
from typing import Any, Self

from torch import nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from ddpforge import disk
from ddpforge.interfaces import Callback, DeviceKind, RunContext, device_kind
from ddpforge.ranks import heartbeat
from ddpforge.training.features import Assembled, Feature, OwnedState

__all__ = ["PARTS", "SlowRank", "SlowRankRule", "SlowRanks", "slowest"]

log = logging.getLogger("ddpforge")

PARTS = ("data", "compute", "other")
"""Parts of a rank's own work: waiting for its data; forward and backward passes; optimizer and callbacks."""
_KEY, _WALL = "?work/", "?work"  # of a part on a rank; of the wall time
_FILE = "slow_ranks.json"  # in the run's folder
_ADVICE = {
    "data": "compare its disk, its network and the load of its CPUs with those of the other hosts",
    "compute": "look for other processes on its device and CPUs, and for a device that lowers its clock "
    "(`nvidia-smi -q -d PERFORMANCE`)",
    "other": "look at callbacks and trackers that do more work on this rank",
}


# ---------------------------------------------------------------------------------------------- decision
@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """Rank whose own work takes longer than that of the median rank, in one interval.

    rank: its number among all ranks of the run.
    factor: its seconds of work divided by those of the median rank.
    seconds, usual: seconds of work per step, of this rank and of the median rank.
    part: the part of its work that exceeds the median most, one of `PARTS`.
    """

    rank: int
    factor: float
    seconds: float
    usual: float
    part: str


def slowest(work: Sequence[Sequence[float]], steps: int) -> SlowRank | None:
    """Returns the rank with the most work; None if the median rank has none.

    `work` has for each rank the seconds of each of `PARTS` in `steps` steps. Of an even number of ranks, the median is
    the faster of the two in the middle, so that of two ranks it is the faster one.
    """
    totals = [sum(parts) for parts in work]
    usual = median_low(totals)
    rank = max(range(len(totals)), key=totals.__getitem__)
    return _described(work, rank, usual, steps) if usual > 0 else None


def _described(work: Sequence[Sequence[float]], rank: int, usual: float, steps: int) -> SlowRank:
    beyond = [mine - median_low(column) for mine, column in zip(work[rank], zip(*work, strict=True), strict=True)]
    seconds = sum(work[rank])
    return SlowRank(
        rank=rank,
        factor=seconds / usual,
        seconds=seconds / steps,
        usual=usual / steps,
        part=PARTS[beyond.index(max(beyond))],
    )


class SlowRankRule:
    """Rule that names slow ranks, from the work of all ranks; equal numbers give equal results on every rank.

    A window has at least `steps` steps and `seconds` of wall time. In a window a rank is an outlier if its work exceeds
    the median by all of: a quarter of the median (of two ranks: two fifths of the faster one), six median absolute
    deviations, a twentieth of the wall time, and a millisecond per step. A rank that is an outlier in each of the last
    `windows` windows is slow, until it does not exceed the median by half of that in as many windows.

    Median and deviation are not moved by slow ranks as long as these are at most half of all; see Rousseeuw and Croux,
    "Alternatives to the Median Absolute Deviation" (1993).
    """

    def __init__(self, ranks: int, *, windows: int = 5, steps: int = 4, seconds: float = 1.0) -> None:
        self.slow: dict[int, SlowRank] = {}
        self._windows, self._least_steps, self._least_seconds = windows, steps, seconds
        self._floor = 0.4 if ranks == 2 else 0.25
        self._history: deque[list[list[float]]] = deque(maxlen=windows)  # work of the newest windows
        self._above, self._below = [0] * ranks, [0] * ranks  # windows in a row
        self._begin(ranks)

    def _begin(self, ranks: int) -> None:
        self._work, self._steps, self._seconds = [[0.0] * len(PARTS) for _ in range(ranks)], 0, 0.0

    def add(
        self, work: Sequence[Sequence[float]], steps: int, seconds: float
    ) -> tuple[Sequence[SlowRank], Sequence[int]]:
        """Adds the work of `steps` steps, which took `seconds` of wall time.

        `work` is as in `slowest`. Returns ranks that have become slow, and ranks that are slow no more.
        """
        for sums, parts in zip(self._work, work, strict=True):
            sums[:] = [total + part for total, part in zip(sums, parts, strict=True)]
        self._steps, self._seconds = self._steps + steps, self._seconds + seconds
        if self._steps < self._least_steps or self._seconds < self._least_seconds:
            return (), ()
        window, steps, seconds = self._work, self._steps, self._seconds
        self._begin(len(window))
        self._history.append([[part / steps for part in parts] for parts in window])

        totals = [sum(parts) for parts in window]
        usual = median_low(totals)
        spread = median_low([abs(total - usual) for total in totals])
        least = max(self._floor * usual, 6 * spread, 0.05 * seconds, 1e-3 * steps)
        for rank, total in enumerate(totals):
            self._above[rank] = self._above[rank] + 1 if total - usual > least else 0
            self._below[rank] = self._below[rank] + 1 if total - usual <= least / 2 else 0
        recent = [[sum(part) for part in zip(*rows, strict=True)] for rows in zip(*self._history, strict=True)]
        middle = median_low(map(sum, recent))
        named = [
            _described(recent, rank, middle, len(self._history))
            for rank, above in enumerate(self._above)
            if above >= self._windows and rank not in self.slow
        ]
        recovered = [rank for rank in self.slow if self._below[rank] >= self._windows]
        self.slow |= {one.rank: one for one in named}
        for rank in recovered:
            del self.slow[rank]
        return named, recovered


# ---------------------------------------------------------------------------------------------- measurement
class _Spans:
    """Seconds between pairs of marks: of the host's clock, or of a device's, which is read when it is over."""

    def __init__(self, kind: DeviceKind) -> None:
        self._kind, self._host = kind, not _has_timers(kind)
        self._began: Any = None
        self._seconds = 0.0
        self._pending: deque[tuple[Any, Any]] = deque()
        self._free: list[Any] = []

    def begin(self, *_: Any) -> None:
        """Marks the beginning; replaces one without an end."""
        self._began = self._mark()

    def end(self, *_: Any) -> None:
        """Marks the end, if there was a beginning."""
        if self._began is None:
            return
        if self._host:
            self._seconds += perf_counter() - self._began
        else:
            self._pending.append((self._began, self._mark()))
        self._began = None

    def take(self) -> float:
        """Returns the seconds of all finished spans since the last call; does not wait for the device."""
        while self._pending and self._pending[0][1].query():
            began, ended = self._pending.popleft()
            self._seconds += began.elapsed_time(ended) / 1000
            self._free += (began, ended)
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _mark(self) -> Any:
        if self._host:
            return perf_counter()
        event = self._free.pop() if self._free else self._kind.module.Event(enable_timing=True)
        event.record()
        return event


def _has_timers(kind: DeviceKind) -> bool:
    """True for devices with events that measure time; the host's clock measures the others, as it does a CPU."""
    return kind.name == "cuda"


class _OwnWork:
    """Measures a rank's own work: seconds in which it does not wait for other ranks, by `PARTS`.

    On a CPU these are phases of the heartbeat in which there is no collective. On another device it is the time from
    the end of a reduction to the next forward pass, in the order of the device's stream; the host's time does not show
    it, because the host runs ahead. Of the passes it is the part that has no collective: forward passes on a CPU if no
    weights are gathered, forward passes of FSDP's blocks, and under DDP the time from the first gradient to the last.
    """

    def __init__(self, run: Assembled) -> None:
        contract, self._kind = run.parts.strategy.contract, device_kind(run.world.device)
        whole = not contract.shards and not contract.splits_forward
        phases = [(heartbeat.DATA,), (), (heartbeat.CALLBACKS, *([heartbeat.STEP] if whole else []))]
        if "weights" not in contract.shards and not contract.splits_forward:
            phases[1] = (heartbeat.FORWARD,)
        self._phases = phases
        self._passes, self._between = _Spans(self._kind), _Spans(self._kind)
        if whole:
            trained = [one for one in run.replica.unwrapped.parameters() if one.requires_grad]
            if len(trained) > 1:
                trained[-1].register_post_accumulate_grad_hook(self._passes.begin)  # type: ignore[no-untyped-call]
                trained[0].register_post_accumulate_grad_hook(self._passes.end)  # type: ignore[no-untyped-call]
        elif not contract.splits_forward and run.parts.recipe.train.compile == "off":
            for block in _innermost(run.replica.module):  # hooks run between FSDP's own, without its all-gather
                block.register_forward_pre_hook(self._begin_training)
                block.register_forward_hook(self._passes.end, prepend=True)
        self._before = heartbeat.seconds_by_phase()

    def _begin_training(self, block: nn.Module, _: Any) -> None:
        if block.training:  # evaluations do not count
            self._passes.begin()

    def before_pass(self) -> None:
        """Ends the time between a reduction and the next forward pass."""
        self._between.end()

    def after_collective(self) -> None:
        """Begins the time between a reduction and the next forward pass."""
        if _has_timers(self._kind):
            self._between.begin()

    def take(self) -> tuple[list[float], float]:
        """Returns the seconds of each part, and of wall time, since the last call."""
        now = heartbeat.seconds_by_phase()
        passed = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        data, forward, other = (sum(passed[phase] for phase in phases) for phases in self._phases)
        if _has_timers(self._kind):
            between, forward = self._between.take(), 0.0
            data = min(data, between)
            other = between - data
        outside = passed[heartbeat.EVAL] + passed[heartbeat.SAVE]
        return [data, forward + self._passes.take(), other], sum(passed) - outside


def _innermost(model: nn.Module) -> Iterable[nn.Module]:
    """Returns the modules whose weights FSDP gathers, without modules that contain others."""
    units = [one for one in model.modules() if isinstance(one, FSDPModule)]
    return (one for one in units if sum(isinstance(part, FSDPModule) for part in one.modules()) == 1)


# ---------------------------------------------------------------------------------------------- feature
class SlowRanks(Feature):
    """Slow ranks of a run with several ranks: a warning, columns of rows, and a file for `ddpforge status`.

    Ranks exchange their work in the reductions that they make anyway.
    """

    def __init__(self, run: Assembled) -> None:
        ranks = run.world.global_ranks
        self._rank, self._hosts = ranks.rank, ranks.all_gather_object(os.uname().nodename)
        self._work, self._rule = _OwnWork(run), SlowRankRule(ranks.size)
        self._file = _File()
        self._step: int | None = None  # of the newest exchange; the first one, with compilation, does not count
        self._newest: SlowRank | None = None
        self._named: list[dict[str, Any]] = []

    @classmethod
    @override
    def of(cls, run: Assembled) -> Self | None:
        return cls(run) if run.trains and run.world.global_ranks.size > 1 else None

    @override
    def callbacks(self) -> Mapping[str, Callback]:
        return {"?slow_ranks": self._file}

    @override
    def before_pass(self, micro: Any) -> None:
        self._work.before_pass()

    @override
    def after_passes(self) -> None:
        self._work.after_collective()

    @override
    def totals(self) -> Mapping[str, float]:
        parts, wall = self._work.take()
        return {f"{_KEY}{self._rank}/{part}": seconds for part, seconds in zip(PARTS, parts, strict=True)} | {
            _WALL: wall
        }

    @override
    def take(self, means: dict[str, float], step: int) -> None:
        """Takes the work of all ranks, each under its own names; logs a rank that becomes slow, or is slow no more."""
        self._work.after_collective()
        work = [[means.pop(f"{_KEY}{rank}/{part}") for part in PARTS] for rank in range(len(self._hosts))]
        wall, before, self._step = means.pop(_WALL), self._step, step
        if before is None or step <= before:  # the first step, or training went back to a checkpoint
            return
        self._newest = slowest(work, step - before)
        named, recovered = self._rule.add(work, step - before, wall)
        if self._rank == 0 and (named or recovered):
            self._report(step, named, recovered)

    def _report(self, step: int, named: Sequence[SlowRank], recovered: Sequence[int]) -> None:
        for one in named:
            host, text = self._hosts[one.rank], self._text(one)
            log.warning("step %d: %s; %s", step, text, _ADVICE[one.part])
            self._named.append(asdict(one) | {"host": host, "text": text, "since": step, "until": None})
        for rank in recovered:
            log.warning("step %d: rank %d on %s is slow no more", step, rank, self._hosts[rank])
            next(one for one in reversed(self._named) if one["rank"] == rank)["until"] = step
        self._file.write(self._named)

    @override
    def row(self, step: int) -> Mapping[str, float]:
        """Returns the rank with the most work since the last exchange, and its work divided by the median rank's."""
        newest = self._newest
        return {"perf/slowest_rank": newest.rank, "perf/slowest_factor": newest.factor} if newest else {}

    def _text(self, one: SlowRank) -> str:
        return (
            f"rank {one.rank} on {self._hosts[one.rank]} is slow: its own work takes {one.factor:.1f} times as long as "
            f"{'the other' if len(self._hosts) == 2 else 'the median'} rank's, mostly in {one.part}"
        )


class _File(OwnedState):
    """File in the run's folder with the ranks that were slow, which rank 0 writes whenever these change."""

    def __init__(self) -> None:
        self._path: Path | None = None

    @override
    def restore(self, state: Mapping[str, Any] | None, is_another: Callable[[], bool]) -> None:
        """Restores nothing: the next ranks may be on other hosts."""

    @override
    def on_start(self, run: RunContext) -> None:
        if run.world.is_rank_zero and run.folder.exists():
            self._path = run.folder / _FILE
            self._path.unlink(missing_ok=True)

    def write(self, named: Sequence[Mapping[str, Any]]) -> None:
        """Writes all ranks that were named in this attempt; `until` is None for a rank that is still slow."""
        if self._path is None:
            return
        try:
            disk.replace(self._path, f"{json.dumps({'named': named}, indent=2)}\n".encode())
        except OSError as error:
            log.warning("%s was not written: %s", self._path, error)
