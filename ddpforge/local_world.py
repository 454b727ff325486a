"""Environment variables of a launcher: their check, the ranks on this machine, and the CPU cores of each."""

import os
from collections.abc import Mapping, MutableMapping

from ddpforge.errors import SetupError
from ddpforge.machine import usable_cores

__all__ = ["VERDICT", "check_launcher_env", "cores_per_rank", "is_launched", "local_world_size", "threads"]
__all__ += ["use_launcher_env"]

VERDICT = "DDPFORGE_VERDICT"  # the environment variable with the path of the file to which ranks report their ends

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
    if not 0 <= int(port := environ.get("MASTER_PORT", "0")) < 2**16:
        raise SetupError(f"MASTER_PORT={port} is not a port: expected a number up to 65535", hints=_WAYS)
    threads(environ)
    rank, size = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
    missing = [name for name in _NEEDED if name not in environ]
    if missing and (rank or size > 1):
        there = ", ".join(f"{name}={environ[name]}" for name in _NEEDED if name in environ)
        raise SetupError(f"the launcher has set {there}, but not {', '.join(missing)}", hints=_WAYS)
    if rank >= max(size, 1):
        raise SetupError(f"RANK={rank}, but WORLD_SIZE={size}: ranks are numbered from 0", hints=_WAYS)


def threads(environ: Mapping[str, str] = os.environ) -> int | None:
    """Returns the first number of OMP_NUM_THREADS, which may be a list for nested loops; None if it is empty or unset.

    Raises SetupError for anything else.
    """
    said = environ.get("OMP_NUM_THREADS", "").strip()
    first = said.partition(",")[0].strip()
    if said and not (first.isdecimal() and int(first)):
        raise SetupError(
            f"the environment variable OMP_NUM_THREADS must be a number of 1 or more, not {said!r}",
            hints=["unset it: `ddpforge launch` divides the cores between the ranks"],
        )
    return int(first) if said else None


def use_launcher_env(environ: MutableMapping[str, str] = os.environ) -> None:
    """Checks a launcher's variables, and changes values that are no use to other libraries.

    Variables of a single process without an address are left over, e.g. from a debugger, and are removed. A list or an
    empty text in OMP_NUM_THREADS becomes a number, or is removed. Raises SetupError, see `check_launcher_env`.
    """
    check_launcher_env(environ)
    if environ.get("WORLD_SIZE") == "1" and not all(name in environ for name in _NEEDED):
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            environ.pop(name, None)
    if "OMP_NUM_THREADS" in environ:
        number = threads(environ)
        if number is None:
            del environ["OMP_NUM_THREADS"]
        else:
            environ["OMP_NUM_THREADS"] = str(number)


def is_launched() -> bool:
    """True in a rank of `ddpforge launch`, which reports failures that ranks cannot."""
    return VERDICT in os.environ


def local_world_size() -> int:
    """Returns the number of the run's ranks on this machine (LOCAL_WORLD_SIZE); 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def cores_per_rank(processes: int) -> int:
    """Returns the cores (at least 1) for each of `processes` processes that share the cores of this process."""
    return max(1, usable_cores() // processes)
