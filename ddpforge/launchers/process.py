"""Runs a launcher to its end: forwards stop requests to it, and kills it if it outlives its ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO, Any

from ddpforge.launchers.exit_record import ExitRecords, LaunchExit
from ddpforge.launchers.store import ADDRESS, clock_at, store_at
from ddpforge.launchers.torchrun import variables_for
from ddpforge.local_world import VERDICT
from ddpforge.machine import process_state
from ddpforge.ranks.signal_policy import is_second_request, received_signal

__all__ = ["PATIENCE", "launch", "start"]

PATIENCE = 15.0  # seconds for a launcher to end after its ranks
# Share of PATIENCE for a launcher that has not read its ranks' exit codes. It checks them often, unless it hangs in a
# connection to a lost store.
_BLIND = 0.2
_LOOK = 1.0
_ENDED = {"Z", "X"}  # states of /proc/PID/stat: the exit code was not read yet (zombie), or it was
_PARTING = 15.0  # seconds for a launcher to end after its ranks are done, when no other rank is alive
_SAVING = 600.0  # seconds for ranks that outlive their launcher
_REPORTING = 10.0  # seconds for their watchdogs


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    output: IO[bytes] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs `command`; returns 0, or the exit code of the first rank that failed; see `start`."""
    return start(command, nproc=nproc, output=output, variables=variables).code


def start(
    command: Sequence[str],
    *,
    nproc: int,
    output: IO[bytes] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
    patience: float = PATIENCE,
    store: AbstractContextManager[Mapping[str, str]] | None = None,
) -> LaunchExit:
    """Runs a launcher command until it ends, and returns its result, from the reports of its ranks.

    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C reach the launcher as one SIGTERM, which it forwards to the ranks: they finish
    their step and save. A second signal of the same kind kills the launcher and the ranks.

    Args:
        command: a command that starts `nproc` ranks on this machine.
        output: receives the output of the command; default: the streams of this process.
        variables: environment variables to add.
        patience: seconds after the end of all ranks until the launcher is killed. If all ranks succeeded, it is killed
            if it only waits for lost machines.
        store: context manager that provides the variables of the watchdogs' store; default: a store for this machine.
    """
    # Launchers reduce every failure to exit code 1, so the ranks write their exit codes to a private file.
    with tempfile.NamedTemporaryFile(prefix="ddpforge-") as file, store or store_at(None, here=True) as ours:
        file_of_records = Path(file.name)
        given = {name: value for name, value in os.environ.items() if value or name != "OMP_NUM_THREADS"}
        environment = {**variables_for(nproc), **given, **ours, **variables, VERDICT: file.name}
        running = _Running(lambda: ExitRecords(file_of_records, nproc), environment.get(ADDRESS))
        with received_signal(running.on_signal):
            # In a new session: otherwise the terminal would send Ctrl-C to the launcher too, which ends at the second.
            running.begin(command, env=environment, start_new_session=True, stdout=output, stderr=output)
            code = running.wait(patience)
        return ExitRecords(file_of_records, nproc).conclude(code, running.first_signal)


class _Running:
    """Running launcher, and the stop signals that it received."""

    def __init__(self, records: Callable[[], ExitRecords], store: str | None) -> None:
        self._records, self._store = records, store
        self._process: subprocess.Popen[bytes] | None = None
        self._received: dict[int, float] = {}

    @property
    def first_signal(self) -> int | None:
        """Returns the first stop signal; None if there was none."""
        return next(iter(self._received), None)

    def on_signal(self, number: int, _: FrameType | None) -> None:
        """Handles a stop signal: the first one terminates the launcher, a repeated one kills all."""
        now, before = time.monotonic(), self._received.get(number)
        if before is None:
            self._received[number] = now
            if self._process and len(self._received) == 1:
                self._process.terminate()
        elif self._process and is_second_request(number, since=now - before):
            self._kill()

    def begin(self, command: Sequence[str], **options: Any) -> None:
        with _held_back(signal.SIGUSR1, signal.SIGHUP):  # without handlers these signals would end the launcher
            self._process = subprocess.Popen(command, **options)
        if self._received:
            self._process.terminate()

    def wait(self, patience: float) -> int:
        """Returns the launcher's exit code after its ranks have ended too."""
        assert self._process is not None
        idle: float | None = None  # time since which no rank is alive, after a failure
        parting: float | None = None  # time since which all ranks here are done
        while True:
            try:
                code = self._process.wait(_LOOK)
                break
            except subprocess.TimeoutExpired:
                parting = (parting or time.monotonic()) if self._all_done() else None
                if parting and self._is_quiet(time.monotonic() - parting):
                    self._kill()
                states = self._left_alone()
                idle = (idle or time.monotonic()) if states else None
                if idle and time.monotonic() - idle > patience * (_BLIND if "Z" in states else 1.0):
                    self._kill()
        self._wait_for_ranks()
        return code

    def _all_done(self) -> bool:
        records = self._records()
        return records.all_done and set(map(process_state, records.pids)) <= _ENDED

    def _is_quiet(self, parting: float) -> bool:
        """True if no rank of any machine has reported lately. The ranks here have been done for `parting` seconds."""
        # Without this check torchrun waits five minutes for a lost machine.
        if not self._store or parting < _PARTING:
            return False
        if (answer := clock_at(self._store)) is None:
            return True  # the store's machine does not answer any more
        quiet = answer["quiet"]  # None: no rank has reported yet, so a rank elsewhere may be busy
        return parting > 2 * _PARTING if quiet is None else bool(quiet > _PARTING)

    def _left_alone(self) -> str:
        """Returns the states of its ranks if all have ended with a failure, else "". "Z": exit code not read yet."""
        records = self._records()
        states = "" if records.all_done else "".join(map(process_state, records.pids))
        return states if set(states) <= _ENDED else ""

    def _wait_for_ranks(self) -> None:
        """Waits for ranks that outlive the launcher, which may be saving, and for watchdogs, which may be reporting."""
        import psutil

        psutil.wait_procs(_processes(self._records().pids), timeout=_SAVING)
        psutil.wait_procs(_processes(self._records().watches), timeout=_REPORTING)

    def _kill(self) -> None:
        """Kills the launcher and all its descendants."""
        import psutil

        assert self._process is not None
        ranks = _processes(self._records().pids)
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._process.pid)
            ranks += [launcher, *launcher.children(recursive=True)]
        for process in ranks:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _processes(pids: Sequence[int]) -> list[Any]:
    """Returns the processes of `pids` that are alive."""
    import psutil

    found = []
    for pid in filter(_is_alive, pids):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _is_alive(pid: int) -> bool:
    """True while the process runs. False for a zombie."""
    return process_state(pid) not in _ENDED


@contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Blocks signals, also in a process started inside this context, which unblocks them when it has handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
