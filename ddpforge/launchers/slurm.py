"""Slurm: the script of a job that trains a recipe and queues itself again, and ranks from the variables of a step."""

from __future__ import annotations

import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from textwrap import dedent

from ddpforge.errors import EnvironmentProblem, UsageError

__all__ = ["Job", "adopt_slurm", "indices", "script", "seconds"]

_PORTS, _MANY = 20_000, 12_000  # from there on so many: below those that Linux hands out, above those of a launch

# What the script decides, and by which option; `sbatch` would take the last of two.
_OURS = {
    **{"nodes": "--nodes", "N": "--nodes", "time": "--time", "t": "--time", "array": "--array", "a": "--array"},
    **{"gpus-per-node": "--gpus-per-node", "gpus": "--gpus-per-node", "G": "--gpus-per-node", "signal": "--signal"},
    **{"ntasks": "--nproc", "n": "--nproc", "ntasks-per-node": "--nproc", "ntasks-per-gpu": "--nproc"},
    **{"requeue": "--max-requeues", "no-requeue": "--max-requeues", "open-mode": ""},
}
_TIME = re.compile(r"(?:(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?)|(?P<plain>\d+(?::\d+){0,2})")

_HEAD = """
    # Who wants this job to stop signals this shell before the time is up, and the ranks when the job is preempted. They
    # are told once, and by USR1: srun passes that on, while TERM makes it kill them. They save, and leave with 75.
    asked=
    step=
    stop() {
        asked=${asked:-yes}
        if [ -n "$step" ] && [ "$asked" != told ]; then
            asked=told
            kill -USR1 "$step" 2>/dev/null
        fi
    }
    trap stop USR1 TERM

    # Queues this job again, where it can resume: a job that was cancelled is not RUNNING any more, and stays away.
    again() {
        if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
            echo "not queued again, which was done $max_requeues times: submit the job again to continue" >&2
        elif [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
            echo "queued again"
            scontrol requeue "$job" && exit 0
        fi
        exit 75
    }
"""
_TAIL = """
    # Until Python hears it, USR1 would be a task's end: it waits, where coreutils are of 2019 (8.31) or later.
    wait_for_python=$(env --block-signal=USR1 echo env --block-signal=USR1 2>/dev/null)
    if [ -z "$asked" ]; then
        srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=600 $wait_for_python bash -c task &
        step=$!
        if [ -n "$asked" ]; then stop; fi
        while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal interrupts it
        wait "$step"
        code=$?
    fi

    # 75: a checkpoint was saved. Beyond 128 a signal has ended them, so early that nothing was to be saved yet.
    if [ "${code:-75}" -eq 75 ]; then again; fi
    if [ -n "$asked" ] && [ "$code" -gt 128 ]; then again; fi
    exit "$code"
"""
_RENDEZVOUS = (
    '--nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --rdzv-endpoint="$head"',
    '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"',
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job: `ranks` processes on each of `nodes` nodes, of `cores` CPU cores each; a GPU each where there are `gpus`.

    `arguments` are those of `ddpforge launch` or `run`: recipe and options. `time` is Slurm's, and `signal` is how many
    seconds before its end ranks are asked to save. Lines of `setup` come first; `sbatch` are more of its options.
    """

    name: str
    arguments: Sequence[str]
    nodes: int = 1
    ranks: int = 1
    gpus: int = 0
    cores: int = 1
    time: str | None = None
    signal: int = 120
    array: str | None = None
    max_requeues: int = 50
    task_per_rank: bool = False
    setup: str = ""
    sbatch: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises UsageError for what contradicts another option, or leaves no time to train."""
        for option in self.sbatch:
            key = option.partition("=")[0]
            if key in _OURS or key.startswith("-"):
                hint = f"use {_OURS[key]}" if _OURS.get(key) else "write it without dashes, --sbatch exclusive"
                raise UsageError(f"--sbatch {option}: the script says that itself", hints=[hint])
        if self.time and (limit := seconds(self.time)) is not None and limit <= self.signal:
            raise UsageError(
                f"--time {self.time} is {limit} s, and ranks are to be asked to save {self.signal} s before its end",
                hints=["give the job more time, or a smaller --signal"],
            )


def seconds(time: str) -> int | None:
    """A time as Slurm writes it: MINUTES, MM:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS; None if it is without limit."""
    if time.lower() in ("infinite", "unlimited"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise UsageError(
            f"--time {time} is no time of Slurm's", hints=["e.g. --time 4:00:00, 1-12:00:00, or minutes: 90"]
        )
    if plain := found["plain"]:
        numbers = [int(number) for number in plain.split(":")]
        hours, minutes, rest = {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
        return hours * 3600 + minutes * 60 + rest
    days, hours, minutes, rest = (int(found[part] or 0) for part in "dhms")
    return days * 86400 + hours * 3600 + minutes * 60 + rest


def indices(array: str) -> list[int]:
    """The numbers of an array's jobs, as `0-7%2`, `1,3` or `0-15:4` give them."""
    found: list[int] = []
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None:
            raise UsageError(f"--array {array} is no list of numbers", hints=["e.g. --array 0-7, 1,3,5 or 0-7%2"])
        first, last, step = (int(number) if number else None for number in match.groups())
        assert first is not None
        found += range(first, first + 1 if last is None else last + 1, step or 1)
    return found


def script(job: Job, command: Sequence[str]) -> str:
    """The text of a job's script; `command` is the command that wrote it."""
    parts = [
        f"#!/bin/bash\n{_directives(job)}",
        f"# Written by: {shlex.join(command)}",
        _settings(job),
        dedent(_HEAD).strip(),
        job.setup.strip(),
        _task(job),
        dedent(_TAIL).strip(),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _directives(job: Job) -> str:
    """Says what the job needs; what people add comes last, as `sbatch` takes the last of two."""
    tasks, cores = (job.ranks, job.cores) if job.task_per_rank else (1, job.ranks * job.cores)
    said = [f"job-name={job.name}", f"nodes={job.nodes}", f"ntasks-per-node={tasks}", f"cpus-per-task={cores}"]
    said += [f"gpus-per-node={job.gpus}"] if job.gpus else []
    said += [f"time={job.time}"] if job.time else []
    said += [f"signal=B:USR1@{job.signal}", "requeue", "open-mode=append"]
    said += [f"array={job.array}", "output=%x-%A_%a.out"] if job.array else ["output=%x-%j.out"]
    return "\n".join(f"#SBATCH --{option}" for option in (*said, *job.sbatch))


def _settings(job: Job) -> str:
    number = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if job.array else '"$SLURM_JOB_ID"'
    lines = [f"max_requeues={job.max_requeues}", f"job={number}"]
    if not job.task_per_rank and job.nodes > 1:  # this script runs on the first node; a launch takes two ports
        lines += ['export head="$SLURMD_NODENAME:$((10000 + 2 * (SLURM_JOB_ID % 5000)))"']
    return "\n".join(lines)


def _task(job: Job) -> str:
    """The function that each task of the step runs; it is in the environment of all of them."""
    # An environment that `setup` enters has a ddpforge of its own.
    forge = ["ddpforge"] if job.setup.strip() else [sys.executable, "-P", "-m", "ddpforge"]
    if job.task_per_rank:
        threads = 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"'
        return _function(threads, f"exec {shlex.join([*forge, 'run', *job.arguments])}")
    launch = f"exec {shlex.join([*forge, 'launch', *job.arguments, f'--nproc={job.ranks}'])}"
    return _function(*([launch, *_RENDEZVOUS] if job.nodes > 1 else [launch]), joint=" \\\n        ")


def _function(*lines: str, joint: str = "\n    ") -> str:
    return f"task() {{\n    {joint.join(lines)}\n}}\nexport -f task"


# ---------------------------------------------------------------------------------------------- in a step
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
