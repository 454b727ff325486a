"""Command lines that start a run's ranks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddpforge.cores import share_of_cores

__all__ = ["ALONE", "NO_GPUS", "RANK", "names_rendezvous", "torchrun_command", "variables_for"]

RANK = ("-P", "-u", "-m", "ddpforge")  # how the words of a rank begin, after Python's own name
# One machine needs no name: ranks would look for the one that it has, which may not resolve.
ALONE = ("--standalone", "--local-addr=127.0.0.1")
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # for ranks that are to compute on the CPU whatever the recipe's parts think


def torchrun_command(arguments: Sequence[str], *, nproc: int, flags: Sequence[str] = ()) -> list[str]:
    """The command that runs `ddpforge run ARGUMENTS` in `nproc` processes on this machine.

    `flags` go to torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html); without a rendezvous among them the
    machine stands alone.
    """
    alone = [] if names_rendezvous(flags) else ALONE
    # -P: a file random.py in the current folder is not the standard library's.
    torchrun = [sys.executable, "-P", "-u", "-m", "ddpforge.launchers.torchrun"]
    torchrun += [*alone, f"--nproc-per-node={nproc}", *flags, "--no-python"]
    return [*torchrun, sys.executable, *RANK, "run", *arguments]


def names_rendezvous(flags: Sequence[str]) -> bool:
    """True if flags of torchrun say where machines meet."""
    wanted = ("--rdzv", "--master", "--nnodes", "--standalone")
    return any(flag.startswith(wanted) for flag in flags)


def variables_for(nproc: int) -> dict[str, str]:
    """The variables that `nproc` ranks on this machine get where the environment does not say otherwise."""
    return {
        "OMP_NUM_THREADS": str(share_of_cores(nproc)),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600",  # seconds for the last checkpoint; torchrun's own 30 are short for it
        # The store that torchrun would share keeps the addresses of dead ranks: those restarted would wait for them.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # Where a node goes first, the store's warnings are pages of C++ frames; ranks and launcher say what it means.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
