"""Command lines that start a run's ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["NO_GPUS", "threads_per_process", "torchrun_command"]

NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # for ranks that are to compute on the CPU whatever the recipe's parts think


def torchrun_command(arguments: Sequence[str], *, nproc: int, flags: Sequence[str] = ()) -> list[str]:
    """The command that runs `ddpforge run ARGUMENTS` in `nproc` processes on this machine.

    `flags` go to torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html); naming a rendezvous there
    replaces the stand-alone one.
    """
    rendezvous = [] if any(flag.startswith(("--rdzv", "--master", "--nnodes")) for flag in flags) else ["--standalone"]
    torchrun = [sys.executable, "-m", "ddpforge.launchers.torchrun", *rendezvous, f"--nproc-per-node={nproc}", *flags]
    return [*torchrun, "-m", "ddpforge", "run", *arguments]


def threads_per_process(nproc: int) -> int:
    """CPU threads for each of `nproc` processes, so that together they have one per core."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)
