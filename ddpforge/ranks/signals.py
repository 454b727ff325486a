"""Requests to stop, made by signals and carried out between two steps."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from functools import cache, partial
from types import FrameType
from typing import Any

__all__ = ["StopRequests", "leave_stopping_to_the_rank"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
log = logging.getLogger("ddpforge")


class StopRequests:
    """While entered, SIGTERM, SIGINT and SIGUSR1 raise a flag; a second SIGINT interrupts at once.

    May be entered again while it is. A flag on one rank is enough: the trainer agrees on it with the others before
    anybody stops.
    """

    def __init__(self) -> None:
        self.requested = False
        self._entered = 0
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> StopRequests:
        self._entered += 1
        if self._entered == 1 and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before.clear()

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        if not self.requested:
            log.info("%s: finishing this step, then saving a checkpoint", signal.Signals(number).name)
        self.requested = True


def leave_stopping_to_the_rank() -> Callable[[int], None]:
    """A `worker_init_fn` for loader processes: launchers and schedulers signal them along with their rank.

    The rank needs them for its last steps, so they let the first signal of each kind pass; the second one ends a
    process that is stuck in its work. Once the rank's interpreter ends, which sends one and waits, so does the first.
    """
    return partial(_leave_stopping, _ending())


@cache
def _ending() -> Any:
    """A byte that other processes see; it is 1 when this one's interpreter ends."""
    byte = multiprocessing.RawValue("b", 0)  # after which comes what multiprocessing does at the end
    atexit.register(setattr, byte, "value", 1)
    return byte


def _leave_stopping(ending: Any, _: int) -> None:
    for number in _SIGNALS:
        signal.signal(number, partial(_ignore_once, ending))


def _ignore_once(ending: Any, number: int, _: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    if ending.value:
        os.kill(os.getpid(), number)
