"""The signals that ask a run to stop: which are heard, and when a second one is an order."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["heard", "insists", "listen", "listened", "stop_with_parent"]

Handler = Callable[[int, FrameType | None], None]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_PDEATHSIG = 1  # of <linux/prctl.h>
_ONE = 5.0  # seconds in which the same signal is the same request: schedulers send it to whole process trees


def listened() -> list[signal.Signals]:
    """The signals, but for those that this process was started to ignore, as nohup does."""
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def insists(number: int, *, since: float | None) -> bool:
    """True for a signal that came `since` seconds after the first of its kind, if that is a request of its own."""
    return since is not None and (number == signal.SIGINT or since > _ONE)


def listen(handler: Handler) -> dict[signal.Signals, Any]:
    """Handles them from now on, also one that came before and was held back; returns the handlers that there were."""
    before = {number: signal.signal(number, handler) for number in listened()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    return before


@contextmanager
def heard(handler: Handler) -> Iterator[None]:
    """Handles them in here; Python lets the main thread alone do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = listen(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def stop_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Has a signal sent to this process when the one that started it ends without a word, as by kill -9.

    Linux alone can do that: prctl(2), PR_SET_PDEATHSIG.
    """
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(_PDEATHSIG, int(number))
