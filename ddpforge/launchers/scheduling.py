"""Linux scheduling policy for the threads of ranks that communicate over gloo.

A rank sets it once, before it joins. The watchdog's process checks once a second whether other programs occupy the
cores. Imports only the standard library, as that process does.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["Contention", "policy_restored", "runs_as_batch", "set_batch_policy"]

_WINDOW, _PAUSE = 1.0, 60.0  # seconds: of one measurement of waiting, and of the default policy after it
_was_set = False  # True if this process has set the policy


def set_batch_policy() -> None:
    """Schedules this thread and its later child threads as SCHED_BATCH (see sched(7)): no preemption at wake-up.

    Does nothing if the process has another policy than the default, or if the system lacks or forbids SCHED_BATCH.
    """
    # Gloo's socket thread may wake up while another of its threads holds the lock of a socket. It then polls until it
    # gets the lock (`Pair::handleEvents` in gloo/transport/tcp). If it has preempted the holder, both wait until the
    # kernel's next tick, up to 4 ms later. With SCHED_BATCH it does not preempt the holder. On two cores a step of a
    # small GPT takes 0.93 of its time under ddp, and 0.75 under fsdp (`chrt --batch 0 python benchmarks/steps` compared
    # with the same without `chrt`).
    global _was_set
    if hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_OTHER and _set(0, os.SCHED_BATCH):
        _was_set = True


def runs_as_batch() -> bool:
    """True if this process has chosen SCHED_BATCH by `set_batch_policy`."""
    return _was_set


@contextmanager
def policy_restored() -> Iterator[None]:
    """Restores the policy of this process's threads on exit, if it was set inside."""
    global _was_set
    before, policy = _was_set, os.sched_getscheduler(0) if hasattr(os, "SCHED_BATCH") else None
    try:
        yield
    finally:
        if policy is not None and _was_set and not before:
            _was_set = False
            _exchange(os.getpid(), os.SCHED_BATCH, policy)


class Contention:
    """Gives the threads of process `pid` the default policy for a minute if other programs occupy the cores."""

    # If a program that never sleeps runs on every core, a SCHED_BATCH thread waits some milliseconds at each wake-up.
    # Then all threads together have waited longer than they have run.
    def __init__(self, pid: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._pid, self._clock, self._paused = pid, clock, False
        self._restart(_WINDOW)

    def look(self) -> None:
        """Checks once a second if the threads had to wait, and switches the policy. May be called more often."""
        if self._clock() < self._next:
            return
        waits = not self._paused and self._waits()
        if self._paused:
            _exchange(self._pid, os.SCHED_OTHER, os.SCHED_BATCH)
        elif waits:
            _exchange(self._pid, os.SCHED_BATCH, os.SCHED_OTHER)
        self._paused = waits
        self._restart(_PAUSE if waits else _WINDOW)

    def _restart(self, seconds: float) -> None:
        self._next, self._spent = self._clock() + seconds, _spent(self._pid)

    def _waits(self) -> bool:
        """True if the threads have waited for cores longer than they have run."""
        passed = [(now, self._spent[thread]) for thread, now in _spent(self._pid).items() if thread in self._spent]
        ran, waited = (sum(now[what] - before[what] for now, before in passed) for what in (0, 1))
        return waited > ran


def _threads(pid: int) -> list[int]:
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # it has ended, or this is not Linux
        return []


def _spent(pid: int) -> dict[int, tuple[int, int]]:
    """Returns the nanoseconds that each thread has run, and waited for a core, if the kernel counts them."""
    found = {}
    for thread in _threads(pid):
        with suppress(OSError, ValueError):  # it has ended
            ran, waited, _ = Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()
            found[thread] = int(ran), int(waited)
    return found


def _exchange(pid: int, old: int, new: int) -> None:
    """Sets the new policy on every thread of a process that has the old one."""
    for thread in _threads(pid):
        with suppress(OSError):  # it has ended
            if os.sched_getscheduler(thread) == old:
                _set(thread, new)


def _set(thread: int, policy: int) -> bool:
    try:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    except OSError:  # some sandboxes forbid it; only speed depends on it
        return False
    return True
