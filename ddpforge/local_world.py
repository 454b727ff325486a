"""Ranks on this machine, and the number of CPU cores for each."""

import os

__all__ = ["cores_per_rank", "local_world_size"]


def local_world_size() -> int:
    """Returns the number of the run's ranks on this machine (LOCAL_WORLD_SIZE); 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_rank(processes: int) -> int:
    """Returns the cores (at least 1) for each of `processes` processes that share the cores of this process."""
    return max(1, len(os.sched_getaffinity(0)) // processes)
