"""The policy by which the kernel shares the cores among the threads of ranks that talk over gloo."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["look_for_others", "may_run_as_batch", "policy_restored", "run_as_batch"]

_TASKS = Path("/proc/self/task")
_WINDOW, _PAUSE = 1.0, 60.0  # seconds: over which waiting is measured, and for which threads then run as by default


def run_as_batch() -> None:
    """Has this thread, and each that it starts from now on, run in batches: none interrupts another as it wakes up.

    Gloo's thread for sockets wakes up while another of its threads holds the lock of a socket, and asks for events
    again and again until it gets that lock (`Pair::handleEvents` in gloo/transport/tcp). Where it has taken the core
    from the holder, both are stuck until the kernel's next tick, up to 4 ms later. Scheduled as SCHED_BATCH, see
    sched(7), it waits until the holder is done. A policy that somebody has chosen stays, and so does that of a machine
    that allows no other.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER and _choose(0, os.SCHED_BATCH):
        _sharing.begin()


def may_run_as_batch() -> bool:
    """True where `run_as_batch` finds what it asks for, or a policy that somebody has chosen."""
    if os.sched_getscheduler(0) != os.SCHED_OTHER:
        return True
    return _choose(0, os.SCHED_BATCH) and _choose(0, os.SCHED_OTHER)


def look_for_others() -> None:
    """Has all threads run as by default for a minute, where others hold the cores; to be called every now and then.

    Where every core has a program that never sleeps, a thread that does not interrupt waits for its core whenever it
    wakes up, some milliseconds each time. All threads together have then waited longer than they have run.
    """
    _sharing.look()


@contextmanager
def policy_restored() -> Iterator[None]:
    """Sets the policy of this thread back in the end, and of those that have it since."""
    before = os.sched_getscheduler(0)
    try:
        yield
    finally:
        _sharing.end()
        if (now := os.sched_getscheduler(0)) != before:
            _exchange(now, before)


class _Sharing:
    """The policy of the threads, once this module has chosen one."""

    def __init__(self) -> None:
        self.end()

    def begin(self) -> None:
        self._next, self._spent = time.monotonic() + _WINDOW, _spent()

    def end(self) -> None:
        self._next, self._spent = float("inf"), {}

    def look(self) -> None:
        if time.monotonic() < self._next:
            return
        paused = os.sched_getscheduler(0) == os.SCHED_OTHER
        waits = not paused and self._waits()
        if paused:
            _exchange(os.SCHED_OTHER, os.SCHED_BATCH)
        elif waits:
            _exchange(os.SCHED_BATCH, os.SCHED_OTHER)
        self.begin()
        self._next += _PAUSE if waits else 0

    def _waits(self) -> bool:
        """True if this process's threads have waited for cores longer than they have run."""
        passed = [(now, self._spent[thread]) for thread, now in _spent().items() if thread in self._spent]
        ran, waited = (sum(now[what] - before[what] for now, before in passed) for what in (0, 1))
        return waited > ran


_sharing = _Sharing()


def _spent() -> dict[int, tuple[int, int]]:
    """The nanoseconds that each thread has run, and waited for a core, where the kernel tells."""
    found = {}
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            ran, waited, _ = (task / "schedstat").read_text().split()
            found[int(task.name)] = int(ran), int(waited)
    return found


def _exchange(old: int, new: int) -> None:
    """Gives the new policy to every thread of this process that has the old one."""
    for task in _TASKS.iterdir():
        with suppress(OSError):  # it has ended
            if os.sched_getscheduler(int(task.name)) == old:
                _choose(int(task.name), new)


def _choose(thread: int, policy: int) -> bool:
    try:
        os.sched_setscheduler(thread, policy, os.sched_param(0))
    except OSError:  # some sandboxes let nobody choose; only speed depends on it
        return False
    return True
