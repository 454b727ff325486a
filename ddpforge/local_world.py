"""Environment variables of a launcher: their check, the ranks on this machine, and the CPU cores of each."""

import os
from collections.abc import Mapping

from ddpforge.errors import SetupError
from ddpforge.machine import usable_cores

__all__ = ["check_launcher_env", "cores_per_rank", "local_world_size"]

_NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by each of several ranks
_WAYS = (
    "to start several processes, use ddpforge launch RECIPE --nproc N, torchrun or accelerate launch",
    "to train in one process, unset RANK and WORLD_SIZE",
)


def check_launcher_env(environ: Mapping[str, str] = os.environ) -> None:
    """Raises SetupError if a launcher's variables are incomplete or contradict each other."""
    for name in _NUMBERS:
        if not environ.get(name, "0").isdecimal():
            raise SetupError(f"the environment variable {name} must be a number, not {environ[name]!r}", hints=_WAYS)
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    missing = [name for name in _NEEDED if name not in environ]
    if missing and (rank or size > 1):
        there = ", ".join(f"{name}={environ[name]}" for name in _NEEDED if name in environ)
        raise SetupError(f"the launcher has set {there}, but not {', '.join(missing)}", hints=_WAYS)
    if rank >= max(size, 1):
        raise SetupError(f"RANK={rank}, but WORLD_SIZE={size}: ranks are numbered from 0", hints=_WAYS)


def local_world_size() -> int:
    """Returns the number of the run's ranks on this machine (LOCAL_WORLD_SIZE); 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_rank(processes: int) -> int:
    """Returns the cores (at least 1) for each of `processes` processes that share the cores of this process."""
    return max(1, usable_cores() // processes)
