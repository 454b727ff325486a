"""`ddpforge plan` in a process of its own, next to a run that uses the result."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

__all__ = ["PlanProcess"]

_NICE = 19
_LAUNCHERS = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|(MASTER|GROUP|ROLE|TORCHELASTIC|ACCELERATE)_.*")


class PlanProcess:
    """Process that computes the plan of a recipe for a number of ranks. It uses no GPU."""

    def __init__(self, recipe: Path, ranks: int, *options: str) -> None:
        plan = ("-P", "-m", "ddpforge", "plan", str(recipe), "--ranks", str(ranks), "--json")
        command = [sys.executable, *plan, *options]
        alone = {name: value for name, value in os.environ.items() if not _LAUNCHERS.fullmatch(name)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # the output is a few kB, which fits into the pipe's buffer
            stderr=subprocess.DEVNULL,
            env=alone | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def give_way(self, nice: int = _NICE) -> None:
        """Gives the process a low CPU priority, by default the lowest."""
        with suppress(psutil.Error):  # the process may have ended
            psutil.Process(self._process.pid).nice(nice)

    @property
    def is_over(self) -> bool:
        """True if the process has ended, with or without a plan."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Waits for the end of the process, at most `seconds` seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def said(self) -> list[dict[str, Any]]:
        """Returns the plans, one per strategy; empty if the process failed."""
        out, _ = self._process.communicate()
        try:
            found: list[dict[str, Any]] = json.loads(out)
        except ValueError:
            return []
        return found

    def end(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait()
