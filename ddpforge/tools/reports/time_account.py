"""Account of the wall time of a run, from the first start to the end, over all attempts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpforge import disk
from ddpforge.api import RunFolder, committed
from ddpforge.errors import SetupError

__all__ = ["BETWEEN", "KINDS", "LOST", "REPEATED", "AttemptAccount", "TimeAccount", "account_of"]

LOST, BETWEEN = "lost work", "between attempts"
KINDS = (
    *("launch", "import", "start", "compile", "data", "forward", "backward", "communication", "waiting", "optimizer"),
    *("callbacks", "evaluation", "save", "end", LOST, BETWEEN, "other"),
)
"""Kinds of time, in the order of a report."""
_NAMES = {"reduce": "communication", "eval": "evaluation"}  # phases of the heartbeat that are kinds of another name
REPEATED = ("data", "forward", "backward", "communication", "waiting", "optimizer", "callbacks", "evaluation", "save")
"""Kinds of time that a later attempt may have to spend again."""
_MOST = 64 << 20  # bytes of a file

Seconds = dict[str, float]


@dataclass(kw_only=True)
class AttemptAccount:
    """Time of an attempt on rank 0: `seconds` by kind, which add up to `end - start` (Unix seconds).

    resumed: the step of the checkpoint that it continued; 0 if there was none.
    done: the last step that it finished. `kept`: the last of these that was not lost.
    ended: "done", also after a requested stop; the class of an error; None if the rank was killed, or still runs.
    waits: seconds for which each rank waited for the gradients of others, by rank; empty if it was not measured.
    saves: the number of checkpoints that it began.
    """

    start: float
    end: float
    resumed: int
    done: int
    kept: int
    ended: str | None
    seconds: Seconds
    waits: dict[int, float] = field(default_factory=dict)
    saves: int = 0
    size: int = 1
    cores: int = 1
    workers: int = 0

    @property
    def lost_steps(self) -> int:
        """Returns the number of finished steps that a later attempt repeated, or must repeat."""
        return max(0, self.done - self.kept)

    def __str__(self) -> str:
        how = {"done": "ended", None: "killed"}.get(self.ended, f"failed with {self.ended}")
        steps = f"steps {self.resumed + 1} to {self.done}" if self.done > self.resumed else "no step"
        lost = f" ({self.lost_steps} of them lost)" if self.lost_steps else ""
        return f"{steps}{lost}, {how}"


@dataclass(kw_only=True)
class TimeAccount:
    """Time of a run: `seconds` by kind over all attempts and between them, which add up to `whole`."""

    attempts: list[AttemptAccount]
    seconds: Seconds
    every: str  # checkpoint.every of the recipe

    @property
    def whole(self) -> float:
        """Returns the seconds from the start of the first attempt to the end of the last."""
        return self.attempts[-1].end - self.attempts[0].start

    @property
    def explained(self) -> float:
        """Returns the share of the time whose kind is known."""
        return 1 - self.seconds.get("other", 0.0) / (self.whole or 1.0)

    def shares(self) -> list[tuple[str, float, float]]:
        """Returns kind, seconds and share of the time, in the order of KINDS, without kinds that did not occur."""
        whole = self.whole or 1.0
        return [(kind, self.seconds[kind], self.seconds[kind] / whole) for kind in KINDS if self.seconds.get(kind)]

    @property
    def waits(self) -> dict[int, float]:
        """Returns the seconds for which each rank waited for others, over all attempts with the last number of ranks.

        The rank that waited least is the slowest.
        """
        found: dict[int, float] = {}
        for attempt in self.attempts:
            if attempt.size == self.attempts[-1].size:
                for rank, seconds in attempt.waits.items():
                    found[rank] = found.get(rank, 0.0) + seconds
        return found

    @property
    def slowest(self) -> str:
        """Returns a sentence about the rank that waited least for the others; empty if ranks were not measured."""
        if not (waits := self.waits):
            return ""
        slowest = min(waits, key=lambda rank: waits[rank])
        others = ", ".join(f"rank {rank} {seconds:.1f} s" for rank, seconds in waits.items() if rank != slowest)
        return f"rank {slowest} waited least for gradients, {waits[slowest]:.1f} s; {others}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the account for JSON."""
        return {
            "whole": round(self.whole, 3),
            "seconds": {kind: round(seconds, 3) for kind, seconds, _ in self.shares()},
            "lost_steps": sum(one.lost_steps for one in self.attempts),
            "waits": {str(rank): round(seconds, 3) for rank, seconds in self.waits.items()},
            "attempts": [
                {
                    **{"start": one.start, "end": round(one.end, 3), "ended": one.ended},
                    **{"resumed": one.resumed, "done": one.done, "lost_steps": one.lost_steps},
                    "seconds": {kind: round(seconds, 3) for kind, seconds in one.seconds.items()},
                }
                for one in self.attempts
            ],
        }


# ---------------------------------------------------------------------------------------------- reading
@dataclass
class _Lines:
    """Lines of one attempt in the file of a rank."""

    head: dict[str, Any]
    newest: dict[str, Any]
    saves: list[dict[str, Any]]
    waits: dict[int, float]


def account_of(folder: RunFolder) -> TimeAccount | None:
    """Reads the account of a run; None if it has none, as runs of earlier versions.

    Raises SetupError for files that are damaged, or cannot be read.
    """
    try:
        return _account_of(folder)
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise SetupError(
            f"{folder.logs / 'time-rank-*.jsonl'} cannot be read: {error}",
            hints=["remove these files: only the account of time uses them"],
        ) from error


def _account_of(folder: RunFolder) -> TimeAccount | None:
    mine = _read(folder.logs / "time-rank-0.jsonl", folder.path)
    if not mine:
        return None
    others = [
        _read(path, folder.path)
        for rank in range(1, max(one.head["size"] for one in mine.values()))
        if (path := folder.logs / f"time-rank-{rank}.jsonl").exists()
    ]
    attempts: list[AttemptAccount] = []
    last = float("-inf")
    for token, lines in sorted(mine.items(), key=lambda pair: float(pair[1].head["created"])):
        ranks = {0: lines, **{one[token].head["rank"]: one[token] for one in others if token in one}}
        attempts.append(_attempt(ranks, last))
        last = attempts[-1].end
    found = [*mine.values()]
    _lose(attempts, found, folder)
    total: Seconds = {}
    for attempt, after in zip(attempts, [*attempts[1:], None], strict=True):
        for kind, seconds in attempt.seconds.items():
            total[kind] = total.get(kind, 0.0) + seconds
        if after is not None:
            total[BETWEEN] = total.get(BETWEEN, 0.0) + after.start - attempt.end
    every = folder.tables().get("checkpoint", {}).get("every", "")
    return TimeAccount(attempts=attempts, seconds=total, every=str(every))


def _read(path: Path, run: Path) -> dict[str, _Lines]:
    """Returns the lines of each attempt with times, by its token."""
    found: dict[str, _Lines] = {}
    current: _Lines | None = None
    try:
        text = disk.read_plain(path, _MOST, within=run)
    except FileNotFoundError:
        return {}
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:  # a crash of the machine cut it off
            continue
        if "attempt" in entry:
            nothing = {"at": 0.0, "first": 0, "done": 0, "exposed": 0.0, "workers": 0, "spent": {}}
            current = found[entry["attempt"]] = _Lines(entry, nothing, [], {})
        elif current is None:
            continue
        elif "save" in entry:
            current.saves.append(entry)
        elif "waits" in entry:
            current.waits.update({int(step): microseconds / 1e6 for step, microseconds in entry["waits"]})
        else:
            current.newest = entry
    return found


def _attempt(ranks: Mapping[int, _Lines], last: float) -> AttemptAccount:
    """Returns the account of an attempt, before work is lost; `last` is the end of the attempt before."""
    lines = ranks[0]
    head, newest = lines.head, lines.newest
    # After a restart of ranks, the launch began before the end of the attempt before.
    start = head["launched"] if head["launched"] >= last else max(last, head["created"])
    end = max(start, head["began"] + newest["at"])
    seconds = {"launch": head["created"] - start, "import": head["began"] - head["created"]}
    waits = _waits(ranks)
    seconds |= _kinds(newest["spent"], waits.get(0, 0.0))
    seconds["other"] = round(end - start - sum(seconds.values()), 4) + 0.0  # not -0.0
    trains = newest["first"] > 0
    resumed = newest["first"] - 1 if trains else 0
    return AttemptAccount(
        start=start,
        end=end,
        resumed=resumed,
        done=newest["done"] if trains else resumed,
        kept=newest["done"] if trains else resumed,
        ended=newest.get("ended"),
        seconds={kind: value for kind, value in seconds.items() if abs(value) > 1e-6},
        waits=waits,
        saves=len(lines.saves),
        size=head["size"],
        cores=head["cores"],
        workers=newest["workers"],
    )


def _kinds(spent: Mapping[str, float], waited: float) -> Seconds:
    found = {_NAMES.get(phase, phase): seconds for phase, seconds in spent.items()}
    if waited and found.get("communication"):
        waited = min(waited, found["communication"])
        found["communication"] -= waited
        found["waiting"] = waited
    return found


def _waits(ranks: Mapping[int, _Lines]) -> dict[int, float]:
    """Returns the seconds that each rank waited for others: its communication beyond that of the last rank to arrive.

    For the last rank, a reduction takes only the time of the communication itself.
    """
    steps = set.intersection(*(set(lines.waits) for lines in ranks.values()))
    if len(ranks) == 1 or not steps:
        return {}
    least = {step: min(lines.waits[step] for lines in ranks.values()) for step in steps}
    found = {}
    for rank, lines in ranks.items():
        measured = sum(lines.waits[step] for step in steps)
        beyond = sum(lines.waits[step] - least[step] for step in steps)
        found[rank] = lines.newest["exposed"] * beyond / measured if measured else 0.0
    return dict(sorted(found.items()))


# ---------------------------------------------------------------------------------------------- lost work
def _lose(attempts: Sequence[AttemptAccount], lines: Sequence[_Lines], folder: RunFolder) -> None:
    """Moves the work that a later attempt repeats, or must repeat, to "lost work"."""
    resumes = math.inf
    if attempts[-1].ended != "done" and not folder.is_claimed():
        found, _ = committed(folder.checkpoints) if folder.checkpoints.is_dir() else ([], None)
        resumes = found[0].manifest.step if found else 0
    for attempt, one in zip(reversed(attempts), reversed(lines), strict=True):
        if one.newest["first"]:
            attempt.kept = int(min(attempt.done, max(resumes, attempt.resumed)))
            if attempt.ended != "done" or attempt.lost_steps:
                _move(attempt, one)
            resumes = min(resumes, attempt.resumed)


def _move(attempt: AttemptAccount, lines: _Lines) -> None:
    """Moves the time after the step `kept` and its checkpoint."""
    seconds = attempt.seconds
    places = [place for place, one in enumerate(lines.saves) if one["save"] == attempt.kept]
    if places:
        after = [one["spent"] for one in lines.saves[places[-1] + 1 :]] or [lines.newest["spent"]]
        begun = {**lines.saves[places[-1]]["spent"], "save": after[0].get("save", 0.0)}
    elif attempt.kept > attempt.resumed:  # killed before it recorded the save
        share = (attempt.kept - attempt.resumed) / max(1, attempt.done - attempt.resumed)
        begun = {phase: share * spent for phase, spent in lines.newest["spent"].items()}
    else:
        begun = {}
    waiting = seconds.get("waiting", 0.0)
    reduced = waiting + seconds.get("communication", 0.0)
    kept = _kinds(begun, begun.get("reduce", 0.0) * waiting / reduced if reduced else 0.0)
    for kind in REPEATED:
        if (more := seconds.get(kind, 0.0) - kept.get(kind, 0.0)) > 0:
            seconds[kind] -= more
            seconds[LOST] = seconds.get(LOST, 0.0) + more
