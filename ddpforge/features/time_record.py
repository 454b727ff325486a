"""Record of the wall time of an attempt by phase, which each rank writes while it trains."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from typing_extensions import override

from ddpforge import disk
from ddpforge.interfaces.environment import Environment, RankWatch, RunAttempt
from ddpforge.local_world import is_launched
from ddpforge.machine import process_created, usable_cores
from ddpforge.ranks import heartbeat
from ddpforge.ranks.run_limits import STARTED

__all__ = ["ATTEMPT", "AttemptTimes", "TimeEnvironment", "time_file"]

log = logging.getLogger("ddpforge")

_SHORTEST, _LONGEST, _SHARE = 0.05, 1.0, 0.02  # seconds between two writes, and their share of the attempt so far
_STALE = 3600.0  # seconds: a start of the launch that is earlier belongs to another program
_ALL_STEPS = 4096  # steps whose waits are all recorded; later ones ever more rarely


def time_file(logs: Path, rank: int) -> Path:
    """Returns the file with the times of a rank, one JSON object a line."""
    return logs / f"time-rank-{rank}.jsonl"


class AttemptTimes:
    """Numbers of the attempt in this process that the heartbeat does not have. They are written by `_Record`.

    exposed: seconds from a rank's last gradient to the end of the backward pass, in which only communication is left.
    waits: the same for single steps, as (step, seconds); all ranks choose equal steps.
    workers: the rank's loader processes.
    saves: step, seconds since the begin, and seconds by phase, of each checkpoint when it began.
    """

    began: float
    _base: tuple[float, ...]

    def __init__(self) -> None:
        self._follows = False
        self.changed = threading.Event()  # set if something must be written at once
        self.enter()
        self.restart()

    def restart(self) -> None:
        """Begins an attempt, which so far has spent its time since the last call of `enter`."""
        self.exposed, self._first, self.workers = 0.0, 0, 0
        self.waits: list[tuple[int, float]] = []
        self.saves: list[tuple[int, float, dict[str, float]]] = []
        self._compiled: dict[int, float] = {}  # by the phase in which it happened
        self._compiling: tuple[int, float] | None = None

    def enter(self) -> None:
        """Records that the code of a run is imported, and begins."""
        heartbeat.beat(heartbeat.START)
        self.began, self._base = time.perf_counter(), heartbeat.seconds_by_phase()

    @property
    def seconds(self) -> float:
        """Returns the seconds since the last call of `enter`."""
        return time.perf_counter() - self.began

    def spent(self) -> dict[str, float]:
        """Returns the seconds of this attempt by phase."""
        passed = [now - before for now, before in zip(heartbeat.seconds_by_phase(), self._base, strict=True)]
        compiled = dict(self._compiled)
        if (running := self._compiling) is not None:
            compiled[running[0]] = compiled.get(running[0], 0.0) + time.perf_counter() - running[1]
        for phase, seconds in compiled.items():
            passed[phase] -= seconds
        passed[heartbeat.BACKWARD] -= self.exposed
        passed[heartbeat.REDUCE] += self.exposed
        found = {name: round(seconds, 6) for name, seconds in zip(heartbeat.NAMES, passed, strict=True) if seconds}
        return found | ({"compile": round(sum(compiled.values()), 6)} if compiled else {})

    def note_wait(self, seconds: float) -> None:
        """Adds the wait of the current step for the gradients of other ranks."""
        self.exposed += seconds
        step = heartbeat.current().step
        self._first = self._first or step
        # All steps would be too many for a long run: the interval between recorded ones doubles with their number.
        if step % (1 << ((step - self._first) // _ALL_STEPS).bit_length()) == 0:
            self.waits.append((step, seconds))

    def note_save(self) -> None:
        """Records that a checkpoint of the current step begins: the work until here is not lost."""
        self.saves.append((heartbeat.current().step, self.seconds, self.spent()))
        self.changed.set()

    def follow_compile(self) -> None:
        """Measures the compilations of this process from now on."""
        if not self._follows:
            from ddpforge import compat

            compat.on_compile(self._begin_compile, self._end_compile)
            self._follows = True

    def _begin_compile(self, *_: object) -> None:
        self._compiling = heartbeat.current().phase, time.perf_counter()

    def _end_compile(self, *_: object) -> None:
        if self._compiling is not None:
            phase, since = self._compiling
            self._compiled[phase] = self._compiled.get(phase, 0.0) + time.perf_counter() - since
            self._compiling = None


ATTEMPT = AttemptTimes()
"""Times of the attempt in this process."""


class TimeEnvironment(Environment):
    """Record of the time of every attempt, on each rank."""

    @override
    def export_variables(self) -> None:
        """Records that a run begins. A run calls it once its code is imported."""
        ATTEMPT.enter()

    @override
    def watch(self, attempt: RunAttempt) -> RankWatch:
        return _Record(attempt)


class _Record(RankWatch):
    """File with the times of an attempt on one rank.

    A thread writes the newest times over the last line, so that a killed rank loses a second of them at most, and a
    step of training nothing. The file grows by a line for each checkpoint, and by some waits.
    """

    def __init__(self, attempt: RunAttempt) -> None:
        self._attempt, self._file = attempt, time_file(attempt.folder / "logs", attempt.rank)
        self._over = False
        self._thread = threading.Thread(target=self._run, name="ddpforge-time", daemon=True)
        self._warned = False

    def __enter__(self) -> Self:
        ATTEMPT.restart()
        if self._attempt.size == 1:  # otherwise the watchdog does it
            heartbeat.use_shared_memory(memoryview(bytearray(8 * heartbeat.WORDS)).cast("q"))
        if self._attempt.compiles:
            ATTEMPT.follow_compile()
        began = time.time() - ATTEMPT.seconds
        created, launched = process_created(), os.environ.get(STARTED)
        if launched is None and not is_launched():
            created = began  # a user's program did other things before
        started = float(launched or created)
        head = {
            "attempt": self._attempt.token,
            "rank": self._attempt.rank,
            "size": self._attempt.size,
            "device": self._attempt.device.type,
            "cores": usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "launched": round(started if 0 <= created - started < _STALE else created, 3),
            "created": round(created, 3),
            "began": round(began, 3),
        }
        try:
            disk.open_plain(self._file, "ab", within=self._attempt.folder).close()
            self._out: Any = disk.open_plain(self._file, "r+b", within=self._attempt.folder, buffering=0)
            size = self._out.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(self._out.fileno(), 1, size - 1) != b"\n"  # by a crash
            self._out.write(b"\n" * torn + _line(head))
            self._end = self._out.tell()
        except OSError as error:
            log.warning("%s cannot be written (%s): the run has no account of its time", self._file, error)
            return self
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Writes the times of the whole attempt."""
        self._over = True
        ATTEMPT.changed.set()
        if self._thread.ident is not None:
            self._thread.join()
            self._write(ended=kind.__name__ if kind else "done")
            self._out.close()

    def _run(self) -> None:
        while not self._over:
            ATTEMPT.changed.wait(max(_SHORTEST, min(_LONGEST, _SHARE * ATTEMPT.seconds)))
            ATTEMPT.changed.clear()
            self._write()

    def _write(self, ended: str | None = None) -> None:
        waits, saves = ATTEMPT.waits[:], ATTEMPT.saves[:]
        kept = [{"save": step, "at": round(at, 6), "spent": spent} for step, at, spent in saves]
        if waits:
            kept.append({"waits": [[step, round(1e6 * seconds)] for step, seconds in waits]})
        place = heartbeat.current()
        newest = {
            "at": round(ATTEMPT.seconds, 6),
            "first": place.first,
            "done": place.step - (heartbeat.DATA <= place.phase <= heartbeat.STEP),
            "phase": heartbeat.NAMES[place.phase],
            "workers": ATTEMPT.workers,
            "exposed": round(ATTEMPT.exposed, 6),
            "spent": ATTEMPT.spent(),
        }
        lines = b"".join(map(_line, kept))
        left = memoryview(lines + _line(newest | ({"ended": ended} if ended else {})))
        try:
            self._out.seek(self._end)
            while left:  # a full disk accepts a part, and then raises OSError
                left = left[self._out.write(left) :]
            self._out.truncate()
        except OSError as error:
            if not self._warned:
                log.warning("%s cannot be written (%s): the account of time has gaps", self._file, error)
            self._warned = True
            return
        self._end += len(lines)
        del ATTEMPT.waits[: len(waits)], ATTEMPT.saves[: len(saves)]


def _line(entry: dict[str, Any]) -> bytes:
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"
