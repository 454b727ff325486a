"""Changes that would shorten a run, each with the time that it would save by the account of its time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ddpforge.tools.reports.time_account import LOST, REPEATED, TimeAccount

__all__ = ["Advice", "advice"]

_LEAST = 0.01  # smallest gain of an advice, as a share of the time
_LEAST_OF_LOADERS = 0.05  # because the processes cost time, too
_WORKERS = 8  # loader processes for a rank, at most


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Change to a recipe, and the time that it would save by the measured times."""

    change: str
    gain: float  # share of the time
    effect: str

    def __str__(self) -> str:
        return f"{self.change}: {self.effect}"


def advice(account: TimeAccount) -> list[Advice]:
    """Returns the changes that would save at least a hundredth of the time, the largest gain first."""
    found = [one for one in (_saves(account), _loaders(account), _evaluations(account), _slow_rank(account)) if one]
    return sorted((one for one in found if one.gain >= _LEAST), key=lambda one: -one.gain)


def _steps(account: TimeAccount) -> int:
    return sum(one.done - one.resumed for one in account.attempts)


def _stepping(account: TimeAccount) -> float:
    """Returns the seconds in steps, lost ones included."""
    rest = ("evaluation", "save")
    return sum(account.seconds.get(kind, 0.0) for kind in (*REPEATED, LOST) if kind not in rest)


def _saves(account: TimeAccount) -> Advice | None:
    """Returns the interval of Young (1974) and Daly (2006), sqrt(2 * stall of a save * time between failures)."""
    failures = sum(1 for one in account.attempts if one.lost_steps)
    saves, steps = sum(one.saves for one in account.attempts), _steps(account)
    stall = account.seconds.get("save", 0.0) / max(1, saves)
    working = _stepping(account)
    if not failures or not saves or not steps or not stall:
        return None
    between, now = working / failures, working / saves
    best = math.sqrt(2 * stall * between)

    def cost(interval: float) -> float:
        return stall / interval + interval / (2 * between)

    step = max(1, round(best * steps / working))
    return Advice(
        change=f'save every {_short(best)}, checkpoint.every = "{step}st" in place of "{account.every}"',
        gain=cost(now) - cost(best),
        effect=f"{_percent(cost(now) - cost(best))} less time in lost work and saves, at one failure in "
        f"{_short(between)}",
    )


def _loaders(account: TimeAccount) -> Advice | None:
    """Returns the number of loader processes that make batches as fast as steps use them."""
    last, data = account.attempts[-1], account.seconds.get("data", 0.0)
    share = data / (_stepping(account) - account.seconds.get(LOST, 0.0) or 1.0)
    rest = 1 - share
    if not data or rest <= 0:
        return None
    work = last.workers or share  # of loaders for a step of length 1: all of its time, or only the wait
    wanted = math.ceil(work / rest)
    workers = min(wanted, _WORKERS, last.cores - 1)
    if workers <= last.workers:
        return None
    after = max(rest, work / workers)
    if 1 - after < _LEAST_OF_LOADERS:
        return None
    return Advice(
        change=f"data.workers = {workers} in place of {last.workers}",
        gain=1 - after,
        effect=f"steps up to {_percent(1 / after - 1)} faster, because {_percent(share)} of a step waits for data",
    )


def _evaluations(account: TimeAccount) -> Advice | None:
    share = account.seconds.get("evaluation", 0.0) / (account.whole or 1.0)
    return Advice(
        change="evaluate half as often (train.eval_every)", gain=share / 2, effect=f"{_percent(share / 2)} less time"
    )


def _slow_rank(account: TimeAccount) -> Advice | None:
    waits = account.waits
    if not waits:
        return None
    slowest = min(waits, key=lambda rank: waits[rank])
    others = [seconds for rank, seconds in waits.items() if rank != slowest]
    waited = min(others) - waits[slowest]
    share = waited / (_stepping(account) or 1.0)
    return Advice(
        change=f"rank {slowest} is the slowest; as fast as the others",
        gain=share,
        effect=f"steps {_percent(1 / (1 - share) - 1)} faster",
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def _short(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"
