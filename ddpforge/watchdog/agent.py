"""Watchdog program of a rank: `python -S -E agent.py SETTINGS`. It ends when its rank ends.

It is a separate process because a process cannot detect its own state if it is frozen, or if all its threads wait for
the interpreter's lock. It imports only the standard library at first, because every rank has one.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = __file__.removesuffix("/ddpforge/watchdog/agent.py")

from ddpforge.errors import ExitCode
from ddpforge.launchers.exit_record import record_exit
from ddpforge.launchers.scheduling import Contention
from ddpforge.local_world import is_launched
from ddpforge.ranks.heartbeat import WORDS
from ddpforge.watchdog.monitor import Limits, Monitor
from ddpforge.watchdog.process import Process
from ddpforge.watchdog.status_board import StatusBoard, within

if TYPE_CHECKING:
    from ddpforge.ranks.heartbeat import RankStatus
    from ddpforge.watchdog.culprit import Culprit
    from ddpforge.watchdog.reporter import RunFolderReporter

__all__ = ["EarlyReporter", "main"]

_SEEN = 15.0  # seconds in which all ranks have read the files
_ALIKE = 4.0  # seconds in which every rank finds an error of the recipe by itself


class EarlyReporter:
    """Reporter (see `monitor.Reporter`) for a rank that starts, process `pid`. It uses only the standard library.

    If another rank has failed, it sends SIGTERM to this one. `ranks.signals.stopping_early` handles that signal.
    """

    def __init__(self, board: StatusBoard, rank: int, pid: int) -> None:
        self._board, self._rank, self._pid = board, rank, pid
        self._stopped = False
        self._seen: float | None = None  # when the failure of another rank was first seen
        os.environ["RANK"] = str(rank)

    def any_failed(self) -> bool:
        """True if the first failure is known. Then sends SIGTERM to this rank once, unless it is the failed rank."""
        # If the failing rank has reported the cause itself, wait: this rank may be about to report the same cause.
        cause = self._board.cause()
        if cause is None:
            return False
        self._seen = self._seen or time.monotonic()
        if cause.get("told") and time.monotonic() - self._seen < _ALIKE:
            return False
        if not self._stopped and cause["rank"] != self._rank:
            self._stopped = True
            with suppress(OSError):
                os.kill(self._pid, signal.SIGTERM)
        return True

    def keep_stacks(self, stacks: str) -> None:
        """Does nothing: there is no folder yet. The row of the rank has its current line."""

    def report_hang(self, found: Culprit, rows: Mapping[int, RankStatus]) -> None:
        """Reports the failed rank to the other ranks and to the launcher; prints the status of all, and the error."""
        error = f"rank {found.ranks[0]} {found.sentence}"
        cause = {"rank": found.ranks[0], "error": error, "code": 1, "by": self._rank}
        if not self._board.record_cause(cause) and self._board.cause():
            return  # another one failed first
        record_exit(1, by_rank=False, error=error, by_watch=True)
        lines = [f"  {row}{'  <-' if rank in found.ranks else ''}" for rank, row in sorted(rows.items())]
        lines = [*(lines if len(rows) > 1 else []), *([] if is_launched() else [f"error: {error}"])]
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def report_end(self, why: str) -> None:
        """Records the exit code of the failed rank as that of this one, which is killed.

        Only rank 0 shows an error that every rank finds, such as an error of the recipe. If rank 0 is killed before it
        finds the error, this prints it.
        """
        cause = self._board.cause() or {}
        code = cause.get("code", 1)
        record_exit(code, by_rank=False)
        if self._rank == 0 and cause.get("told") and code == ExitCode.USAGE:
            print(f"error: rank {cause['rank']} failed first: {cause['error']}", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Removes the folder through which ranks without a store communicate, after the others have read it."""
        if (logs := self._board.place) is None:
            return
        if self._board.cause():
            for stream in (1, 2):
                os.close(stream)  # otherwise a program that reads them would wait for this process
            time.sleep(_SEEN)
        shutil.rmtree(logs, ignore_errors=True)


class LazyReporter:
    """Reporter that imports `reporter.RunFolderReporter` when it is first needed, because that import is expensive."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._loaded: RunFolderReporter | None = None

    def any_failed(self) -> bool:
        """True if the file of the first failure exists. False if the disk hangs."""
        path = f"{self._settings['folder']}/logs/failure-cause"
        return bool(within(2.0, lambda: os.path.exists(path)))

    def keep_stacks(self, stacks: str) -> None:
        """Calls `RunFolderReporter.keep_stacks`."""
        within(3.0, lambda: self._reporter().keep_stacks(stacks))

    def report_hang(self, found: Culprit, rows: Mapping[int, RankStatus]) -> None:
        """Calls `RunFolderReporter.report_hang`."""
        within(5.0, lambda: self._reporter().report_hang(found, rows))

    def leave(self) -> None:
        """Does nothing: all files stay in the run's folder."""

    def report_end(self, why: str) -> None:
        """Calls `RunFolderReporter.report_end`."""
        within(3.0, lambda: self._reporter().report_end(why))

    def _reporter(self) -> RunFolderReporter:
        if self._loaded is None:
            sys.path[1:] = self._settings["path"]
            from ddpforge.watchdog.reporter import reporter_for

            self._loaded = reporter_for(self._settings, self._settings["rank"], self._settings["size"])
        return self._loaded


def main(settings: Mapping[str, Any]) -> None:
    """Watches the rank until it has ended or was killed."""
    words = memoryview(mmap.mmap(settings["words"], WORDS * 8)).cast("q")
    process = Process(settings["pid"], words, settings["stacks"], settings["main"])
    limits = Limits(settings["hang_timeout"] or float("inf"), settings["compiles"], settings["grace"])
    board = StatusBoard(
        settings["logs"], settings["attempt"], settings["store"], seldom=min(10.0, limits.hang_timeout / 4)
    )
    reporter = LazyReporter(settings) if settings["folder"] else EarlyReporter(board, settings["rank"], settings["pid"])
    monitor = Monitor(settings["rank"], settings["size"], process, board, reporter, limits)
    contention = Contention(settings["pid"]) if settings["batch"] else None
    while not process.ended(limits.poll_interval):
        if contention:
            contention.look()
        if monitor.poll():
            break
    else:
        monitor.died()
    reporter.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
