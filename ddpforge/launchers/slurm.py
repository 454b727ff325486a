"""Slurm: writes the script of a job that trains a recipe and requeues itself; reads ranks from a step's variables."""

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

from ddpforge.errors import SetupError, UsageError
from ddpforge.interfaces.environment import Environment

__all__ = ["Job", "SlurmEnvironment", "export_slurm_env", "indices", "script", "seconds"]

_PORTS, _MANY = 20_000, 12_000  # first port and their number: below Linux's ephemeral ports, above those of a launch

# sbatch options that the script sets, with the ddpforge option for each; `sbatch` would use the last of two values.
_OURS = {
    **{"nodes": "--nodes", "N": "--nodes", "time": "--time", "t": "--time", "array": "--array", "a": "--array"},
    **{"gpus-per-node": "--gpus-per-node", "gpus": "--gpus-per-node", "G": "--gpus-per-node", "signal": "--signal"},
    **{"ntasks": "--nproc", "n": "--nproc", "ntasks-per-node": "--nproc", "ntasks-per-gpu": "--nproc"},
    **{"requeue": "--max-requeues", "no-requeue": "--max-requeues", "open-mode": ""},
}
_TIME = re.compile(r"(?:(?P<d>\d+)-(?P<h>\d+)(?::(?P<m>\d+)(?::(?P<s>\d+))?)?)|(?P<plain>\d+(?::\d+){0,2})")

_HEAD = """
    # Slurm signals this shell before the time limit, and the ranks when the job is preempted. This shell sends the
    # ranks one USR1: srun forwards USR1, but kills the ranks at TERM. The ranks save and exit with 75.
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

    # Requeues this job, which then resumes. A cancelled job is not RUNNING any more, and is not requeued.
    again() {
        if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
            echo "not requeued: the limit of $max_requeues requeues is reached; submit the job again to continue" >&2
        elif [ "$(squeue --noheader --jobs "$job" --format %T)" = RUNNING ]; then
            echo "requeued the job"
            scontrol requeue "$job" && exit 0
        fi
        exit 75
    }
"""
_TAIL = """
    # USR1 would end a task before Python handles it. It is blocked until then, with coreutils 8.31 (2019) or later.
    wait_for_python=$(env --block-signal=USR1 echo env --block-signal=USR1 2>/dev/null)
    if [ -z "$asked" ]; then
        srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=0 --wait=600 $wait_for_python bash -c task &
        step=$!
        if [ -n "$asked" ]; then stop; fi
        while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a signal interrupts it
        wait "$step"
        code=$?
    fi

    # 75: a checkpoint was saved. Above 128: a signal ended the ranks before there was anything to save.
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
    """Slurm job that trains a recipe.

    name: the job's name.
    arguments: recipe and options of `ddpforge launch`, or of `ddpforge run` with `task_per_rank`.
    nodes, ranks, gpus: the number of nodes, and of ranks and GPUs on each node.
    cores: CPU cores per rank.
    time: the job's time limit, in Slurm's format.
    signal: seconds before the time limit at which ranks receive a request to save.
    array: Slurm's array of job numbers, as "0-7%2".
    max_requeues: how often the job may requeue itself.
    task_per_rank: start each rank as a Slurm task, without torchrun.
    setup: lines of shell to run first.
    sbatch: further options of `sbatch`, without dashes.
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
        """Raises UsageError if options contradict each other, or leave no time to train."""
        for option in self.sbatch:
            key = option.partition("=")[0]
            if key in _OURS or key.startswith("-"):
                hint = f"use {_OURS[key]}" if _OURS.get(key) else "write it without dashes, --sbatch exclusive"
                raise UsageError(f"--sbatch {option}: the script sets this option itself", hints=[hint])
        if self.time and (limit := seconds(self.time)) is not None and limit <= self.signal:
            raise UsageError(
                f"--time {self.time} is {limit} s, but ranks have to save {self.signal} s before its end",
                hints=["use a longer --time, or a smaller --signal"],
            )


def seconds(time: str) -> int | None:
    """Returns the seconds in MINUTES, MM:SS, H:MM:SS, D-H, D-H:MM or D-H:MM:SS (Slurm's formats); None for no limit."""
    if time.lower() in ("infinite", "unlimited"):
        return None
    found = _TIME.fullmatch(time)
    if found is None:
        raise UsageError(
            f"--time {time} is not a time in Slurm's format", hints=["e.g. --time 4:00:00, 1-12:00:00, or minutes: 90"]
        )
    if plain := found["plain"]:
        numbers = [int(number) for number in plain.split(":")]
        hours, minutes, rest = {1: [0, *numbers, 0], 2: [0, *numbers], 3: numbers}[len(numbers)]
        return hours * 3600 + minutes * 60 + rest
    days, hours, minutes, rest = (int(found[part] or 0) for part in "dhms")
    return days * 86400 + hours * 3600 + minutes * 60 + rest


def indices(array: str) -> list[int]:
    """Returns the job numbers in Slurm's array format: `0-7%2`, `1,3` or `0-15:4`."""
    found: list[int] = []
    for part in array.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None:
            raise UsageError(f"--array {array} is not a list of numbers", hints=["e.g. --array 0-7, 1,3,5 or 0-7%2"])
        first, last, step = (int(number) if number else None for number in match.groups())
        assert first is not None
        found += range(first, first + 1 if last is None else last + 1, step or 1)
    return found


def script(job: Job, command: Sequence[str]) -> str:
    """Returns the text of a job's script; `command` is the command line that generates it."""
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
    """Returns the #SBATCH lines. The user's own come last, because `sbatch` uses the last of two values."""
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
    if not job.task_per_rank and job.nodes > 1:  # the script runs on the first node; a launch uses two ports
        lines += ['export head="$SLURMD_NODENAME:$((10000 + 2 * (SLURM_JOB_ID % 5000)))"']
    return "\n".join(lines)


def _task(job: Job) -> str:
    """Returns the shell function that each task of the step runs; it is exported to their environment."""
    # The environment that `setup` activates has its own ddpforge.
    forge = ["ddpforge"] if job.setup.strip() else [sys.executable, "-P", "-m", "ddpforge"]
    if job.task_per_rank:
        threads = 'export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}"'
        return _function(threads, f"exec {shlex.join([*forge, 'run', *job.arguments])}")
    launch = f"exec {shlex.join([*forge, 'launch', *job.arguments, f'--nproc={job.ranks}'])}"
    return _function(*([launch, *_RENDEZVOUS] if job.nodes > 1 else [launch]), joint=" \\\n        ")


def _function(*lines: str, joint: str = "\n    ") -> str:
    return f"task() {{\n    {joint.join(lines)}\n}}\nexport -f task"


# ---------------------------------------------------------------------------------------------- in a step
class SlurmEnvironment(Environment):
    """Step of a Slurm job whose tasks are the ranks."""

    def export_variables(self) -> None:
        """Sets torchrun's variables from those of the step."""
        export_slurm_env()


def export_slurm_env(environ: MutableMapping[str, str] = os.environ) -> bool:
    """Sets torchrun's environment variables in a Slurm step (`srun`) of several tasks; True if it did.

    Does nothing if a launcher has set RANK. Raises SetupError if Slurm's variables do not name the other tasks.
    """
    # Of the step: SLURM_NTASKS is that of the whole job.
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
        raise SetupError(
            f"this is one of {size} tasks of a Slurm step, but its variables do not name the other tasks ({error})",
            hints=["start one `ddpforge launch` on each node, or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"],
        ) from error
    environ.update(found)
    return True


def _tasks(counts: str) -> list[int]:
    """Returns the number of tasks of each node: "2(x3),1" is [2, 2, 2, 1]."""
    found: list[int] = []
    for part in counts.split(","):
        number, _, times = part.partition("(x")
        found += [int(number)] * int(times.rstrip(")") or 1)
    return found


def _first(nodes: str) -> str:
    """Returns the first host of a list in Slurm's format: n01 of "n[01-02,5],m3"."""
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", nodes).partition(",")[0]


def _reachable(node: str) -> str:
    """Returns the node's name if it resolves, else Slurm's address of it: node names may be aliases."""
    try:
        socket.getaddrinfo(node, None)
        return node
    except OSError:
        shown = subprocess.run(["scontrol", "show", "node", "-o", node], capture_output=True, text=True)
        if found := re.search(r"NodeAddr=(\S+)", shown.stdout):
            return found[1]
        raise ValueError(f"the node {node} has no known address") from None


def _port(environ: MutableMapping[str, str]) -> int:
    """Returns a port: the same on all tasks of a step, but not for other steps and restarts of the job."""
    attempt = int(environ.get("SLURM_RESTART_COUNT", "0")) % 7
    step = int(environ.get("SLURM_STEP_ID", "0"))
    return _PORTS + (int(environ["SLURM_JOB_ID"]) * 97 + step * 7 + attempt) % _MANY
