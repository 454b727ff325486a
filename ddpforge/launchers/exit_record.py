"""Result of a launch, from the reports of its ranks and its launcher: lines of JSON in a private file."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpforge.errors import ExitCode
from ddpforge.local_world import VERDICT

__all__ = [
    *("RankDeath", "LaunchExit", "ExitRecords", "has_begun", "is_final"),
    *("record_begun", "record_death", "record_halt", "record_start", "record_exit", "record_watch"),
]


@dataclass(frozen=True)
class RankDeath:
    """Rank that was ended by a signal before any other rank failed."""

    rank: int
    signal: int

    def __str__(self) -> str:
        with suppress(ValueError):
            return f"ended by signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"ended by signal {self.signal}"


@dataclass(frozen=True)
class LaunchExit:
    """Result of a launch. `code` is 0, or the exit code of the first rank that failed."""

    code: int
    death: RankDeath | None = None
    ranks: frozenset[int] = frozenset()  # ranks that reported their own end
    reported: bool = False  # True if a rank reported `code`; otherwise it is the launcher's
    error: str | None = None  # the first error that a rank reported
    watched: str | None = None  # the failure of a starting rank, reported by a watchdog


def record_start() -> None:
    """Records the process of a rank; called by the rank once it handles stop signals."""
    _record({"rank": _rank(), "pid": os.getpid()})


def record_watch(pid: int) -> None:
    """Records the watchdog process of a rank; called by the rank."""
    _record({"rank": _rank(), "watch": pid})


def record_begun() -> None:
    """Records that the run's folder is locked for this run; called by a rank."""
    _record({"rank": _rank(), "begun": True})


def has_begun() -> bool:
    """True if ranks of this launch have had the run's folder before, and this is a restart."""
    if path := os.environ.get(VERDICT):
        return any("begun" in entry for entry in _entries(Path(path)))
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def record_exit(code: int, *, by_rank: bool = True, error: str | None = None, by_watch: bool = False) -> None:
    """Records the exit code of a rank for the launch; called by a rank that ends, or by its watchdog.

    Args:
        code: the exit code.
        by_rank: True if the rank itself has reported the cause.
        error: the cause.
        by_watch: a watchdog reports the first failure, and the launch has to print it.
    """
    entry: dict[str, Any] = {"rank": _rank(), "code": int(code), "spoke": by_rank}
    _record(entry | ({"error": error} if error else {}) | ({"by_watch": True} if by_watch else {}))


def record_halt() -> None:
    """Records that the whole run stops, so that no launcher restarts it; called by a rank."""
    _record({"rank": _rank(), "halt": True})


def record_death(rank: int, signal: int) -> None:
    """Records the signal that ended a rank; called by the launcher."""
    _record({"rank": rank, "signal": signal})


def _rank() -> int:
    number = os.environ.get("RANK", "0")
    return int(number) if number.isdecimal() else 0


def _record(entry: Mapping[str, Any]) -> None:
    if path := os.environ.get(VERDICT):
        with open(path, "a") as file:
            file.write(json.dumps(entry) + "\n")


def _entries(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class ExitRecords:
    """All reports so far in a launch of `nproc` ranks on this machine."""

    def __init__(self, path: Path, nproc: int) -> None:
        self._all = _entries(path)
        starts = [number for number, entry in enumerate(self._all) if "pid" in entry]
        # Restarted ranks report everything again; only the last attempt counts.
        self._last = self._all[starts[-nproc] :] if len(starts) >= nproc else self._all
        self._nproc = nproc

    @property
    def pids(self) -> list[int]:
        """Returns the processes of all ranks that have begun."""
        return [entry["pid"] for entry in self._all if "pid" in entry]

    @property
    def watches(self) -> list[int]:
        """Returns the processes of all watchdogs."""
        return [entry["watch"] for entry in self._all if "watch" in entry]

    @property
    def codes(self) -> list[int]:
        """Returns the exit codes of the last attempt's ranks, in the order in which they ended."""
        return [entry["code"] for entry in self._last if "code" in entry]

    @property
    def all_done(self) -> bool:
        """True if every rank ended with code 0."""
        return self.codes[-self._nproc :] == [0] * self._nproc

    @property
    def begun(self) -> bool:
        """True if ranks have had the run's folder. Such ranks must not be killed, because they may be saving."""
        return any("begun" in entry for entry in self._last)

    @property
    def halted(self) -> bool:
        """True if the whole run stops, so that a restart is not wanted."""
        return any("halt" in entry for entry in self._last)

    def conclude(self, code: int, stop_signal: int | None) -> LaunchExit:
        """Returns the result of the launch.

        Args:
            code: the exit code of the launcher, negative for a signal.
            stop_signal: the first stop signal that the launch received. If no rank has begun, the result is STOPPED,
                except after SIGINT: nothing is lost.
        """
        if code == 0 or self.all_done:
            return LaunchExit(0)  # failures of earlier attempts or of the launcher itself do not count
        failed = [entry for entry in self._last if entry.get("code")]
        return LaunchExit(
            failed[0]["code"] if failed else self._unreported_code(code, stop_signal),
            next(
                (RankDeath(entry["rank"], entry["signal"]) for entry in reversed(self._last) if "signal" in entry), None
            ),
            frozenset(entry["rank"] for entry in self._last if entry.get("spoke")),
            reported=bool(failed),
            error=next((entry["error"] for entry in failed if "error" in entry), None),
            watched=next((entry["error"] for entry in failed if "by_watch" in entry), None),
        )

    def _unreported_code(self, code: int, stop_signal: int | None) -> int:
        if stop_signal and stop_signal != signal.SIGINT and not self.pids:
            return ExitCode.PREEMPTED
        signalled = stop_signal or -code
        return 128 + signalled if signalled > 0 else code


def is_final(codes: Sequence[int]) -> bool:
    """True if a restart cannot help: the recipe is wrong, or training diverges and would again."""
    return any(code in (ExitCode.USAGE, ExitCode.DIVERGED) for code in codes)
