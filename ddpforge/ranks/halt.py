"""The end of a whole run that its owner asks for: after so much time, or by a file in the run's folder."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddpforge import disk
from ddpforge.errors import UsageError
from ddpforge.interfaces.durations import Duration
from ddpforge.launchers.verdict import STARTED

__all__ = ["STOP", "Halt", "seconds_of"]

STOP = "STOP"  # the file's name
_LOOK = 1.0  # seconds between two looks at the disk
log = logging.getLogger("ddpforge")


def seconds_of(max_time: str | None) -> float:
    """The value of --max-time in seconds; raises UsageError where it is no wall time."""
    if max_time is None:
        return math.inf
    try:
        duration = Duration.parse(max_time)
    except ValueError:
        duration = Duration(0, "s")
    if not duration.is_time or duration.value <= 0:
        raise UsageError(f"--max-time {max_time} is no wall time", hints=['expected one such as "30s", "90m" or "4h"'])
    return duration.seconds


class Halt:
    """Tells whether a run is to stop, on whichever node and however often its ranks are restarted; rank 0 looks.

    The time counts from the start of the launch, or of this process. A file that is older than that was meant for an
    earlier attempt and is removed; so is one that was obeyed.
    """

    def __init__(self, folder: Path, max_time: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = folder / STOP, clock
        began = float(os.environ.get(STARTED, clock()))
        self._until, self._next = began + seconds_of(max_time), -math.inf
        with suppress(OSError):
            if self._file.stat().st_mtime < began:
                log.warning("%s is older than this start: removed", self._file)
                disk.remove(self._file)

    def asked(self) -> bool:
        """True when time is up, or the file is there."""
        now = self._clock()
        if now >= self._until:
            return True
        if now < self._next:
            return False
        self._next = now + _LOOK
        return self._file.exists()

    def obeyed(self) -> None:
        """The run has stopped: the next start is not to."""
        with suppress(FileNotFoundError):
            disk.remove(self._file)


class NoHalt(Halt):
    """Stands in on ranks that do not look."""

    def __init__(self) -> None: ...

    def asked(self) -> bool:
        """Never: rank 0 says so."""
        return False

    def obeyed(self) -> None: ...
