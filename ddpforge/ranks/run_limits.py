"""Ends a whole run on request: after a wall time, or by a file in the run's folder."""

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

__all__ = ["STARTED", "STOP", "RunLimits", "seconds_of"]

STARTED = "DDPFORGE_STARTED"  # the environment variable with the start of the launch, in seconds since 1970
STOP = "STOP"  # the file's name
_LOOK = 1.0  # seconds between two checks of the disk
log = logging.getLogger("ddpforge")


def seconds_of(max_time: str | None, what: str = "the maximum time") -> float:
    """Returns the value of --max-time in seconds (infinite for None); raises UsageError if it is not a time."""
    if max_time is None:
        return math.inf
    try:
        duration = Duration.parse(str(max_time))
    except ValueError:
        duration = Duration(0, "s")
    if not duration.is_time or duration.value <= 0:
        raise UsageError(f"{what} {max_time} is not a time with a unit", hints=['expected e.g. "30s", "90m" or "4h"'])
    return duration.seconds


class RunLimits:
    """Request to stop a whole run, by a maximum wall time or by the file STOP; only rank 0 checks it.

    The time counts from the start of the launch, also after restarts of ranks; without a launcher, from the start of
    this process. A file older than this start is for an earlier attempt and is removed. `acknowledge` removes the
    file too.
    """

    def __init__(self, folder: Path, max_time: str | None = None, clock: Callable[[], float] = time.time) -> None:
        self._file, self._clock = folder / STOP, clock
        began = float(os.environ.get(STARTED, clock()))
        self._until, self._next = began + seconds_of(max_time), -math.inf
        with suppress(OSError):
            if self._file.stat().st_mtime < began:
                log.warning("%s is older than this start: removed", self._file)
                disk.remove(self._file)

    def stop_requested(self) -> bool:
        """True if the time is over or the file exists; checks the file once a second at most."""
        now = self._clock()
        if now >= self._until:
            return True
        if now < self._next:
            return False
        self._next = now + _LOOK
        return self._file.exists()

    def acknowledge(self) -> None:
        """Removes the file after the run has stopped, so that the next start does not stop again."""
        with suppress(FileNotFoundError):
            disk.remove(self._file)


class NoLimits(RunLimits):
    """Null object for ranks that do not check."""

    def __init__(self) -> None: ...

    def stop_requested(self) -> bool:
        """Returns False: only rank 0 checks."""
        return False

    def acknowledge(self) -> None: ...
