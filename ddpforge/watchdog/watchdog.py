"""Starts the watchdog of a rank and gives it access to the rank's heartbeats."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ddpforge.errors import ExitCode, PeerFailed
from ddpforge.interfaces.environment import Environment, RankWatch, RunAttempt
from ddpforge.launchers.exit_record import record_watch
from ddpforge.launchers.scheduling import runs_as_batch
from ddpforge.launchers.store import ADDRESS
from ddpforge.machine import STACKS, create_shared_file
from ddpforge.ranks import heartbeat
from ddpforge.watchdog import agent
from ddpforge.watchdog.device_progress import DeviceProgress
from ddpforge.watchdog.status_board import StatusBoard

__all__ = [
    "Watchdog",
    "WatchdogEnvironment",
    "end_startup_watch",
    "failure_of_another",
    "report_startup_failure",
    "watch_startup",
]

# Variables that identify one start of the ranks; torchrun takes a new port for every attempt.
_ATTEMPT = (
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
_HANG_TIMEOUT = 600.0  # seconds: the recipe's default, until the recipe is read
_GRACE = 6.0  # seconds for a starting rank to end by itself after another rank has failed
_PATIENCE = 1.5  # seconds in which the failing rank reports the cause
_ANSWER = 15.0  # seconds in which the called watchdogs report the rank at fault
_OLD = 15.0  # seconds; older files are of an earlier start
_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class WatchdogEnvironment(Environment):
    """A watchdog process next to each of several ranks."""

    def watch(self, attempt: RunAttempt) -> RankWatch:
        """Returns the watchdog of this rank; none for a single rank."""
        return RankWatch() if attempt.size == 1 else Watchdog(attempt)

    def peer_failure(self) -> PeerFailed | None:
        """Returns the first failure that ranks or their watchdogs report; None if there is none in time."""
        return _peer_failed(cause) if (cause := _cause()) else None


class Watchdog(RankWatch):
    """Context manager that runs a watchdog process for this rank, see `agent`."""

    def __init__(self, attempt: RunAttempt) -> None:
        self._progress = DeviceProgress(attempt.device)
        folder = attempt.folder.absolute()
        self._settings = {
            "folder": str(folder),
            "logs": f"{folder}/logs",
            "attempt": attempt.token,
            "rank": attempt.rank,
            "size": attempt.size,
            "strategy": attempt.strategy,
            "hang_timeout": attempt.hang_timeout,
            "compiles": attempt.compiles,
            "grace": 10.0,
            "store": os.environ.get(ADDRESS, ""),
        }

    def __enter__(self) -> Self:
        end_startup_watch()
        self._beside = _Agent(self._settings)
        self._progress.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the watchdog; the attempt has reported its own end."""
        heartbeat.mark_exited()
        self._progress.__exit__(None, None, None)
        self._beside.end()

    def call(self) -> None:
        """Calls the watchdogs of all ranks to publish their status and to find the rank that the others wait for."""
        _board(self._settings).call()


class _Agent:
    """Watchdog process, started with `settings`, and the memory that it shares with this process."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._words, self._stacks = create_shared_file("ddpforge-words"), create_shared_file("ddpforge-stacks")
        os.truncate(self._words, heartbeat.WORDS * 8)
        heartbeat.use_shared_memory(memoryview(mmap.mmap(self._words, heartbeat.WORDS * 8)).cast("q"))
        faulthandler.register(STACKS, file=self._stacks, all_threads=True)
        self._keeps_last = not faulthandler.is_enabled()  # otherwise the user has chosen a file for crash stacks
        if self._keeps_last:
            faulthandler.enable(file=self._stacks, all_threads=True)  # at SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL
        mine = {"pid": os.getpid(), "main": threading.get_ident(), "path": sys.path, "batch": runs_as_batch()}
        settings_of_agent = {**settings, **mine, "words": self._words, "stacks": self._stacks}
        command = [sys.executable, "-S", "-E", agent.__file__, json.dumps(settings_of_agent)]
        with _left_to_the_rank():
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(self._words, self._stacks)
            )
        record_watch(self._process.pid)

    def end(self) -> None:
        """Ends the watchdog, but not the rank."""
        self._process.kill()
        self._process.wait()
        faulthandler.unregister(STACKS)
        if self._keeps_last:
            faulthandler.disable()
        os.close(self._words)
        os.close(self._stacks)


# ---------------------------------------------------------------------------------------------- before there is a run
class _Starting:
    """Watchdog of a rank from its first line until the watchdog of its attempt starts."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings, self._beside = settings, _Agent(settings)

    def end(self) -> None:
        self._beside.end()
        if not self.settings["store"]:
            logs, rank = Path(self.settings["logs"]), self.settings["rank"]
            with suppress(OSError):
                (logs / f"phase-rank-{rank}.json").unlink(missing_ok=True)
                logs.rmdir()  # succeeds on the last rank


_starting: list[_Starting] = []  # at most one per process


def watch_startup() -> None:
    """Starts the watchdog of this process if it is one of several ranks. Call it before imports and before joining.

    Watchdogs communicate through the launcher's store. Without a store, they use a folder on this machine if all ranks
    are on it; otherwise there is no watchdog.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1 or _starting or "RANK" not in os.environ:
        return
    store = os.environ.get(ADDRESS, "")
    meeting = "-".join(os.environ.get(name, "") for name in _ATTEMPT)
    logs = "" if store else _rendezvous_folder(meeting, alone=os.environ.get("LOCAL_WORLD_SIZE") == str(size))
    if store or logs:
        settings = {"folder": "", "logs": logs, "attempt": f"start {meeting}", "rank": int(os.environ["RANK"])}
        settings |= {"size": size, "hang_timeout": _HANG_TIMEOUT, "compiles": False, "grace": _GRACE, "store": store}
        _starting.append(_Starting(settings))


def end_startup_watch() -> None:
    """Ends the watchdog of the start: the start is over, or the watchdog of the attempt begins."""
    while _starting:
        _starting.pop().end()


def report_startup_failure(code: int, error: str | None) -> None:
    """Reports to the other ranks, which may wait for this one to join, that it ends with `code` because of `error`."""
    heartbeat.mark_exited()
    if _starting and code:
        rank = _starting[0].settings["rank"]
        _board(_starting[0].settings).record_cause(
            {"rank": rank, "error": error or "", "code": int(code), "told": True}
        )


def failure_of_another() -> PeerFailed | None:
    """Returns the failure of another rank while this one starts, if one is known."""
    if not _starting:
        return None
    board = _board(_starting[0].settings)
    board.rows()  # the store's reply includes the cause
    return _peer_failed(cause) if (cause := board.cause()) else None


def _peer_failed(cause: Mapping[str, Any]) -> PeerFailed:
    """Returns the error for this rank after the failure `cause` of another rank."""
    # Every rank finds an error of the recipe; then only rank 0 shows it.
    said = not cause.get("told") or cause["code"] != ExitCode.USAGE
    return PeerFailed(
        ExitCode(cause["code"]), f"rank {cause['rank']} failed first: {cause['error']}", launcher_prints=said
    )


def _cause() -> Any:
    """Returns the first failure that the ranks or their watchdogs report; None if there is none in time."""
    if not _starting:
        return None
    heartbeat.mark_exited()  # this rank is not at fault
    board = _board(_starting[0].settings)
    for patience in (_PATIENCE, _ANSWER):
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            board.called()
            board.rows()  # the store's reply includes the cause
            if cause := board.cause():
                return cause
            time.sleep(0.1)
        if patience == _PATIENCE:
            board.call()
    return None


def _board(settings: Mapping[str, Any]) -> StatusBoard:
    return StatusBoard(settings["logs"], settings["attempt"], settings["store"], seldom=0.0)


def _rendezvous_folder(name: str, *, alone: bool) -> str:
    """Returns a folder of this user through which ranks on this machine communicate; "" if there can be none."""
    place = Path(tempfile.gettempdir()) / f"ddpforge-{os.getuid()}-{sha256(name.encode()).hexdigest()[:16]}"
    try:
        if not alone:
            return ""
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)
        found = place.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            return ""
        for old in place.iterdir():
            if time.time() - old.stat().st_mtime > _OLD:  # from an earlier start that was killed
                old.unlink(missing_ok=True)
    except OSError:
        return ""
    return str(place)


@contextmanager
def _left_to_the_rank() -> Iterator[None]:
    """Blocks the stop signals of ranks in a process that is started inside this context."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
