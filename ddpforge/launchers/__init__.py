"""Starting the processes of a run: builds a launcher's command line and reads what became of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO

__all__ = [
    *("Death", "Ended", "launch", "start", "threads_per_process", "torchrun_command"),
    *("NO_GPUS", "record_death", "record_verdict"),
]

VERDICT = "DDPFORGE_VERDICT"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
NO_GPUS = {"CUDA_VISIBLE_DEVICES": ""}  # for ranks that are to compute on the CPU whatever the recipe's parts think
_GRACE = "600"  # seconds that ranks get for their last step and checkpoint; torchrun's own 30 are short for that


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


@dataclass(frozen=True)
class Death:
    """A rank that a signal ended, before any other had failed."""

    rank: int
    signal: int

    def __str__(self) -> str:
        with suppress(ValueError):
            return f"ended by signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"ended by signal {self.signal}"


@dataclass(frozen=True)
class Ended:
    """The end of a launch: 0, or the exit code of the first rank that failed; and what only a launcher can know."""

    code: int
    death: Death | None = None
    ranks: frozenset[int] = frozenset()  # those that said how they ended


def launch(
    command: Sequence[str],
    *,
    nproc: int,
    output: IO[bytes] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs `command`; returns 0, or the exit code of the first rank that failed; see `start`."""
    return start(command, nproc=nproc, output=output, variables=variables).code


def start(
    command: Sequence[str],
    *,
    nproc: int,
    output: IO[bytes] | None = None,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> Ended:
    """Runs `command` until it ends, which starts `nproc` ranks on this machine.

    What it prints goes to `output`; by default, where this process prints. `variables` join those of the environment.

    Launchers flatten every failure to 1, so the ranks also write their codes to a file that only this launch knows.
    SIGTERM, SIGUSR1, SIGHUP and Ctrl-C each reach the launcher as one SIGTERM, which it passes on to the ranks: they
    finish their step and save. A second Ctrl-C kills launcher and ranks.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, _: FrameType | None) -> None:
        asked.append(number)
        if process and len(asked) == 1:
            process.terminate()
        elif process and number == signal.SIGINT:
            _kill(process.pid)

    heard = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]  # nohup ignores one
    before = {number: signal.signal(number, stop) for number in heard}
    defaults = {"OMP_NUM_THREADS": str(threads_per_process(nproc)), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _GRACE}
    try:
        with tempfile.NamedTemporaryFile(prefix="ddpforge-") as verdict:
            environment = {**defaults, **os.environ, **variables, VERDICT: verdict.name}
            # A session of its own: a terminal would send Ctrl-C to the launcher too, which gives up at the second.
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)
            if asked:
                process.terminate()
            code = process.wait()
            words = [json.loads(line) for line in Path(verdict.name).read_text().splitlines()]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

    codes = [word["code"] for word in words if "code" in word]
    if code == 0 or codes[-nproc:] == [0] * nproc:
        return Ended(0)  # whatever an earlier attempt or the launcher itself came to
    signalled = asked[0] if asked else -code
    return Ended(
        next((code for code in codes if code), 128 + signalled if signalled > 0 else code),
        next((Death(word["rank"], word["signal"]) for word in reversed(words) if "signal" in word), None),
        frozenset(word["rank"] for word in words if word.get("spoke")),
    )


def _kill(pid: int) -> None:
    """Ends a process and all that it has started, at once."""
    import psutil

    launcher = psutil.Process(pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def record_verdict(code: int, *, spoke: bool = True) -> None:
    """Called by a rank that ends: tells `start`, if that has started it, how, and whether it could say why."""
    _record({"rank": int(os.environ.get("RANK", "0")), "code": int(code), "spoke": spoke})


def record_death(rank: int, signal: int) -> None:
    """Called by the launcher that has seen it."""
    _record({"rank": rank, "signal": signal})


def _record(word: Mapping[str, int]) -> None:
    if path := os.environ.get(VERDICT):
        with open(path, "a") as file:
            file.write(json.dumps(word) + "\n")
