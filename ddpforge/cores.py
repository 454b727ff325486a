"""Ranks on this machine, and the number of CPU cores for each."""

import os

__all__ = ["ranks_here", "share_of_cores"]


def ranks_here() -> int:
    """Returns the number of the run's ranks on this machine (LOCAL_WORLD_SIZE); 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def share_of_cores(processes: int) -> int:
    """Returns the cores (at least 1) for each of `processes` processes that share the cores of this process."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
