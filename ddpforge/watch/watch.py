"""Starts the process beside a rank, and lets it see where the rank stands."""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from ddpforge.launchers.store import ADDRESS
from ddpforge.launchers.verdict import record_watch
from ddpforge.ranks import phases
from ddpforge.watch import sidecar
from ddpforge.watch.board import Board
from ddpforge.watch.process import STACKS

__all__ = ["Unwatched", "Watch"]

_LEFT_TO_THE_RANK = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


class Unwatched:
    """A rank without others: whoever started it sees what becomes of it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was started."""

    def call(self) -> None:
        """There is nobody to call."""


class Watch(Unwatched):
    """While entered, a process beside this one watches where the rank stands, see `sidecar`.

    `folder` is the run's, `attempt` the token of this attempt, `stall` the seconds for which a rank may stand in one
    place (0: for ever), `compiles` whether the first step has to compile.
    """

    def __init__(
        self, folder: Path, attempt: str, rank: int, size: int, *, strategy: str, stall: float, compiles: bool
    ) -> None:
        self._settings = {
            "folder": str(folder.absolute()),
            "attempt": attempt,
            "rank": rank,
            "size": size,
            "strategy": strategy,
            "stall": stall,
            "compiles": compiles,
            "store": os.environ.get(ADDRESS, ""),
            "pid": os.getpid(),
            "main": threading.get_ident(),
            "path": sys.path,
        }

    def __enter__(self) -> Self:
        self._words, self._stacks = os.memfd_create("ddpforge-words"), os.memfd_create("ddpforge-stacks")
        os.truncate(self._words, phases.WORDS * 8)
        phases.share(memoryview(mmap.mmap(self._words, phases.WORDS * 8)).cast("q"))
        faulthandler.register(STACKS, file=self._stacks, all_threads=True)
        settings = {**self._settings, "words": self._words, "stacks": self._stacks}
        command = [sys.executable, "-S", "-E", sidecar.__file__, json.dumps(settings)]
        with _left_to_the_rank():
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=2, pass_fds=(self._words, self._stacks)
            )
        record_watch(self._process.pid)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The attempt has ended, and has said how."""
        phases.say_goodbye()
        self._process.kill()
        self._process.wait()
        faulthandler.unregister(STACKS)
        os.close(self._words)
        os.close(self._stacks)

    def call(self) -> None:
        """Has the processes beside all ranks say where those stand, and find the one that the others wait for."""
        found = self._settings
        Board(f"{found['folder']}/logs", str(found["attempt"]), str(found["store"]), seldom=0.0).call()


@contextmanager
def _left_to_the_rank() -> Iterator[None]:
    """Has a process that is started here never get the signals that tell a rank to stop."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
