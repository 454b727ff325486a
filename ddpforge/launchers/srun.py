"""A world from the variables of a Slurm step, where `srun` has started one task for each rank."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from collections.abc import MutableMapping

from ddpforge.errors import EnvironmentProblem

__all__ = ["adopt_slurm"]

_PORTS, _MANY = 20_000, 12_000  # from there on so many: below those that Linux hands out, above those of a launch


def adopt_slurm(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Sets what torchrun would set, in a step of several tasks; True if it did.

    A launcher's own variables win. A step is what `srun` starts: SLURM_NTASKS would be the whole job's. Raises
    EnvironmentProblem where tasks could not find each other: several that each train alone would be no run.
    """
    size = int(environ.get("SLURM_STEP_NUM_TASKS", "1"))
    if "RANK" in environ or "SLURM_PROCID" not in environ or size == 1:
        return False
    try:
        node = int(environ["SLURM_NODEID"])
        found = {
            "RANK": environ["SLURM_PROCID"],
            "LOCAL_RANK": environ["SLURM_LOCALID"],
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(_tasks(environ["SLURM_STEP_TASKS_PER_NODE"])[node]),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": environ.get("MASTER_ADDR") or _reachable(_first(environ["SLURM_STEP_NODELIST"])),
            "MASTER_PORT": environ.get("MASTER_PORT") or str(_port(environ)),
        }
    except (KeyError, IndexError, ValueError) as error:
        raise EnvironmentProblem(
            f"this is one of {size} tasks of a Slurm step, whose variables do not say how to find the others ({error})",
            hints=["start one `ddpforge launch` on each node, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"],
        ) from error
    environ.update(found)
    return True


def _tasks(counts: str) -> list[int]:
    """Tasks by node: "2(x3),1" is [2, 2, 2, 1]."""
    found: list[int] = []
    for part in counts.split(","):
        number, _, times = part.partition("(x")
        found += [int(number)] * int(times.rstrip(")") or 1)
    return found


def _first(nodes: str) -> str:
    """The first of a list of hosts: "n[01-02,5],m3" begins with n01."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _reachable(node: str) -> str:
    """The node's name where it resolves; else the address that Slurm itself uses, as names there may be aliases."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        shown = subprocess.run(["scontrol", "show", "node", "-o", node], capture_output=True, text=True)
        if found := re.search(r"NodeAddr=(\S+)", shown.stdout):
            return found[1]
        raise ValueError(f"nobody knows the node {node}") from None


def _port(environ: MutableMapping[str, str]) -> int:
    """The same on all tasks of a step, and another one for every other step, and for a job that is started again."""
    attempt = int(environ.get("SLURM_RESTART_COUNT", "0")) % 7
    step = int(environ.get("SLURM_STEP_ID", "0"))
    return _PORTS + (int(environ["SLURM_JOB_ID"]) * 97 + step * 7 + attempt) % _MANY
