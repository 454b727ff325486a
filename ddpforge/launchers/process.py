"""Runs a launcher to its end, and passes requests to stop on to it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import IO

from ddpforge.launchers.command import threads_per_process
from ddpforge.launchers.store import ADDRESS, serving
from ddpforge.launchers.verdict import VERDICT, Ended, conclude

__all__ = ["launch", "start"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
_GRACE = "600"  # seconds that ranks get for their last step and checkpoint; torchrun's own 30 are short for that


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
        with tempfile.NamedTemporaryFile(prefix="ddpforge-") as verdict, serving() as port:
            ours = {ADDRESS: f"127.0.0.1:{port}", **variables, VERDICT: verdict.name}
            environment = {**defaults, **os.environ, **ours}
            # A session of its own: a terminal would send Ctrl-C to the launcher too, which gives up at the second.
            process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=output, stderr=output)
            if asked:
                process.terminate()
            code = process.wait()
            return conclude(Path(verdict.name), code=code, nproc=nproc, asked=asked[0] if asked else None)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(pid: int) -> None:
    """Ends a process and all that it has started, at once."""
    import psutil

    launcher = psutil.Process(pid)
    for process in [launcher, *launcher.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            process.kill()
