"""How the kernel shares the cores among the threads of ranks that talk over gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["policy_restored", "run_as_batch"]


def run_as_batch() -> None:
    """Has this thread, and each that it starts from now on, run in batches: none interrupts another as it wakes up.

    Gloo's thread for a socket wakes up while another of its threads holds the lock of that socket, and asks for events
    again and again until it gets the lock. Where it has taken the core from the holder, both are stuck until the
    kernel's next tick, 4 ms later. Scheduled as SCHED_BATCH (see sched(7)) it waits until the holder is done. A policy
    that somebody has chosen stays, and so does that of a machine that allows no other.
    """
    if os.sched_getscheduler(0) == os.SCHED_OTHER:
        _choose(os.SCHED_BATCH)


@contextmanager
def policy_restored() -> Iterator[None]:
    """Sets the policy of this thread back in the end."""
    before = os.sched_getscheduler(0)
    try:
        yield
    finally:
        if os.sched_getscheduler(0) != before:
            _choose(before)


def _choose(policy: int) -> None:
    with suppress(OSError):  # some sandboxes let nobody choose; only speed depends on it
        os.sched_setscheduler(0, policy, os.sched_param(0))
