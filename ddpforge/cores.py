"""The ranks on this machine, and each one's share of its cores."""

import os

__all__ = ["ranks_here", "share_of_cores"]


def ranks_here() -> int:
    """The run's ranks on this machine, as its launcher tells; 1 without one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share_of_cores(processes: int) -> int:
    """The cores, at least one, for each of so many processes that share those of this one."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
