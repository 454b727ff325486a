"""Signals that request a stop: how they are handled, and when a second signal ends the process at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

__all__ = ["handle_signals", "handling_signals", "is_second_request", "received_signal"]

Handler = Callable[[int, FrameType | None], None]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_ONE = 5.0  # seconds in which a repeated signal is the same request: schedulers send it to whole process trees


def handling_signals() -> list[signal.Signals]:
    """Returns the stop signals, except for signals that this process ignores from its start, as under nohup."""
    return [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def is_second_request(number: int, *, since: float | None) -> bool:
    """True if a signal `since` seconds after the first one of its kind is a new request."""
    return since is not None and (number == signal.SIGINT or since > _ONE)


def handle_signals(handler: Handler) -> dict[signal.Signals, Any]:
    """Installs `handler` for the stop signals and unblocks them. Returns the previous handlers."""
    before = {number: signal.signal(number, handler) for number in handling_signals()}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
    return before


@contextmanager
def received_signal(handler: Handler) -> Iterator[None]:
    """Installs `handler` for the stop signals inside this context. Does nothing outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = handle_signals(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
