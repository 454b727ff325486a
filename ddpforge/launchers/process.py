"""Runs a launcher to its end: passes requests to stop on to it, and ends it when it outlives its ranks."""

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

from ddpforge.launchers.requests import heard, insists
from ddpforge.launchers.store import ADDRESS, clock_at, store_at
from ddpforge.launchers.torchrun import variables_for
from ddpforge.launchers.verdict import VERDICT, Ended, Words

__all__ = ["PATIENCE", "launch", "start"]

PATIENCE = 15.0  # seconds that a launcher gets to end after its ranks
_BLIND = 0.2  # of that, where it has not even noticed: it looks often, unless a store hangs that it has lost touch with
_LOOK = 1.0
_ENDED = {"Z", "X"}  # as the kernel has it: nobody has asked for the exit code yet, or somebody has
_PARTING = 15.0  # seconds that a launcher gets to end after ranks that are done, when no other rank is alive
_SAVING = 600.0  # seconds for ranks that outlive their launcher
_TELLING = 10.0  # seconds for the processes beside them


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
) -> Ended:
    """Runs `command` until it ends, which starts `nproc` ranks on this machine.

    What it prints goes to `output`; by default, where this process prints. `variables` join those of the environment,
    and so do those of the `store` in which ranks show where they stand, by default one for this machine.

    Launchers flatten every failure to 1, so the ranks also write their codes to a file that only this launch knows.
    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C each reach the launcher as one SIGTERM, which it passes on to the ranks: they
    finish their step and save. A second one of the same kills launcher and ranks; so does a launcher's own failure to
    end within `patience` seconds of its ranks. A launcher that waits for lost machines when all
    ranks are done is ended too.
    """
    with tempfile.NamedTemporaryFile(prefix="ddpforge-") as file, store or store_at(None, here=True) as ours:
        said = Path(file.name)
        environment = {**variables_for(nproc), **os.environ, **ours, **variables, VERDICT: file.name}
        running = _Running(lambda: Words(said, nproc), environment.get(ADDRESS))
        with heard(running.ask):
            # A session of its own: a terminal would send Ctrl-C to the launcher too, which gives up at the second.
            running.begin(command, env=environment, start_new_session=True, stdout=output, stderr=output)
            code = running.wait(patience)
        return Words(said, nproc).conclude(code, running.asked)


class _Running:
    """A launcher, and what it was asked."""

    def __init__(self, words: Callable[[], Words], store: str | None) -> None:
        self._words, self._store = words, store
        self._process: subprocess.Popen[bytes] | None = None
        self._asked: dict[int, float] = {}

    @property
    def asked(self) -> int | None:
        """The first signal that asked it to stop."""
        return next(iter(self._asked), None)

    def ask(self, number: int, _: FrameType | None) -> None:
        """Handles a signal."""
        now, before = time.monotonic(), self._asked.get(number)
        if before is None:
            self._asked[number] = now
            if self._process and len(self._asked) == 1:
                self._process.terminate()
        elif self._process and insists(number, since=now - before):
            self._kill()

    def begin(self, command: Sequence[str], **options: Any) -> None:
        with _held_back(signal.SIGUSR1, signal.SIGHUP):  # until it has handlers, these would be its end
            self._process = subprocess.Popen(command, **options)
        if self._asked:
            self._process.terminate()

    def wait(self, patience: float) -> int:
        """Its exit code, when its ranks have ended too."""
        assert self._process is not None
        idle: float | None = None  # since when no rank has been alive, after one failed
        parting: float | None = None  # since when all ranks here are done
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
        words = self._words()
        return words.all_done and set(map(_state, words.pids)) <= _ENDED

    def _is_quiet(self, parting: float) -> bool:
        """True if no rank has shown itself for long: torchrun waits five minutes for a machine that was lost.

        The ranks here have been done for `parting` seconds.
        """
        if not self._store or parting < _PARTING:
            return False
        if (answer := clock_at(self._store)) is None:
            return True  # the store's machine is gone
        quiet = answer["quiet"]  # None: no rank has been watched yet, so one elsewhere may be busy
        return parting > 2 * _PARTING if quiet is None else bool(quiet > _PARTING)

    def _left_alone(self) -> str:
        """The states of its ranks, "Z" for one that it has not looked at since; empty unless all have failed."""
        words = self._words()
        states = "" if words.all_done else "".join(map(_state, words.pids))
        return states if set(states) <= _ENDED else ""

    def _wait_for_ranks(self) -> None:
        """They may be saving, when a signal has ended their launcher at once; who saw one die may be telling of it."""
        import psutil

        psutil.wait_procs(_processes(self._words().pids), timeout=_SAVING)
        psutil.wait_procs(_processes(self._words().watches), timeout=_TELLING)

    def _kill(self) -> None:
        """Ends it and all that it has started, at once."""
        import psutil

        assert self._process is not None
        ranks = _processes(self._words().pids)
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self._process.pid)
            ranks += [launcher, *launcher.children(recursive=True)]
        for process in ranks:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def _processes(pids: Sequence[int]) -> list[Any]:
    """Those that are alive."""
    import psutil

    found = []
    for pid in filter(_is_alive, pids):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _is_alive(pid: int) -> bool:
    """True while the process runs; one that has ended and that nobody has waited for does not."""
    return _state(pid) not in _ENDED


def _state(pid: int) -> str:
    """The kernel's letter for what a process does; "X" for one that is gone."""
    with suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "X"


@contextmanager
def _held_back(*numbers: signal.Signals) -> Iterator[None]:
    """Signals wait, also in what is started here, which lets them in when it is ready."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
