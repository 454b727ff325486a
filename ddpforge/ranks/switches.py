"""The settings that a run changes for its whole process, which may be somebody's notebook."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ddpforge.ranks.arithmetic import arithmetic_restored
from ddpforge.ranks.scheduling import policy_restored

__all__ = ["restored"]


@contextmanager
def restored() -> Iterator[None]:
    """Sets back in the end how torch computes, and how this thread is scheduled."""
    with arithmetic_restored(), policy_restored():
        yield
