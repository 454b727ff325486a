"""Starting the processes of a run: builds a launcher's command line and reads what became of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

__all__ = ["launch", "record_verdict", "threads_per_process", "torchrun_command"]

VERDICT = "DDPFORGE_VERDICT"


def torchrun_command(arguments: Sequence[str], *, nproc: int, flags: Sequence[str] = ()) -> list[str]:
    """The command that runs `ddpforge run ARGUMENTS` in `nproc` processes on this machine.

    `flags` go to torchrun (https://docs.pytorch.org/docs/stable/elastic/run.html); naming a rendezvous there
    replaces the stand-alone one.
    """
    rendezvous = [] if any(flag.startswith(("--rdzv", "--master", "--nnodes")) for flag in flags) else ["--standalone"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", *rendezvous, f"--nproc-per-node={nproc}", *flags]
    return [*torchrun, "-m", "ddpforge", "run", *arguments]


def threads_per_process(nproc: int) -> int:
    """CPU threads for each of `nproc` processes, so that together they have one per core."""
    return max(1, len(os.sched_getaffinity(0)) // nproc)


def launch(command: Sequence[str], *, nproc: int) -> int:
    """Runs `command`, passing on SIGTERM and SIGUSR1; returns the exit code of the first rank that failed, or 0.

    Launchers flatten every failure to 1, so the ranks also write their codes to a file that only this launch knows.
    A terminal sends Ctrl-C to the whole process group: the ranks have it already, and this process waits for them.
    """
    with tempfile.NamedTemporaryFile(prefix="ddpforge-") as verdict:
        environment = {"OMP_NUM_THREADS": str(threads_per_process(nproc))} | os.environ | {VERDICT: verdict.name}
        process = subprocess.Popen(command, env=environment)

        def pass_on(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGUSR1)}
        before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
        codes = [int(line) for line in Path(verdict.name).read_text().split()]
    return next((code for code in codes if code), code)


def record_verdict(code: int) -> None:
    """Called by a rank that ends: tells `launch`, if there is one, how."""
    if path := os.environ.get(VERDICT):
        with open(path, "a") as file:
            file.write(f"{code}\n")
