"""Finds the largest micro-batch that fits into memory, by trying each in a process of its own. Needs no torch."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from tempfile import TemporaryFile
from typing import Any

from ddpforge.errors import ForgeError
from ddpforge.machine import available_memory, opens_nvidia_gpu, resident_memory
from ddpforge.recipe import load_recipe
from ddpforge.recipe.run_plan import plan_batch

__all__ = ["Found", "Try", "find_micro_batch", "fitting", "sizes"]

_STEPS = 2  # the optimizer's state exists from the second one on
_LOOK = 0.05  # seconds between two measurements of a process's memory


@dataclass(frozen=True)
class Try:
    """Result for one micro-batch: whether it fits, the peak memory in bytes, and samples per second if it fits."""

    micro_batch: int
    fits: bool
    memory: int | None = None
    samples_per_second: float | None = None


@dataclass(frozen=True)
class Found:
    """Sizes that were tried, in this order."""

    global_batch: int
    ranks: int
    tries: Sequence[Try]

    @property
    def micro_batch(self) -> int | None:
        """Returns the largest micro-batch that fits; None if none fits."""
        return max((one.micro_batch for one in self.tries if one.fits), default=None)

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON."""
        found = self.micro_batch
        accumulation = found and self.global_batch // (found * self.ranks)
        tries = [vars(one) for one in self.tries]
        return {"micro_batch": found, "accumulation": accumulation, "global_batch": self.global_batch, "tries": tries}


def find_micro_batch(
    recipe: str,
    *,
    sets: Sequence[str] = (),
    ranks: int = 1,
    budget: int | None = None,
    on_result: Callable[[Try], None] = lambda one: None,
) -> Found:
    """Tries micro-batches that keep the global batch, on `ranks` ranks of this machine.

    A size fits if two steps and some of an evaluation neither fill the memory nor take more than `budget` bytes on a
    rank. `on_result` is called after every try. Raises ForgeError if a process fails for another reason.
    """
    train = load_recipe(recipe, sets=sets).recipe.train
    plan_batch(train.model_copy(update={"micro_batch": None}), ranks)  # raises RecipeError
    shards = train.virtual_ranks or ranks
    tries: list[Try] = []
    room = available_memory() if ranks == 1 else None

    def fits(size: int) -> bool:
        tries.append(_tried(recipe, [*sets, f"train.micro_batch={size}"], size, ranks, budget, room))
        on_result(tries[-1])
        return tries[-1].fits

    fitting(sizes(train.global_batch // shards), fits)
    return Found(train.global_batch, ranks, tries)


def sizes(unit: int) -> list[int]:
    """Returns the micro-batches that divide a rank's share `unit` of the global batch, in ascending order."""
    return [size for size in range(1, unit + 1) if unit % size == 0]


def fitting(candidates: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """Returns the largest of ascending candidates that fits; no candidate fits that is larger than an unfit one."""
    low, high = -1, len(candidates)  # fits, and does not
    middle = high - 1  # the largest first: if it fits, no other must be tried; then bisection
    while high - low > 1:
        low, high = (middle, high) if fits(candidates[middle]) else (low, middle)
        middle = (low + high) // 2
    return candidates[low] if low >= 0 else None


# ---------------------------------------------------------------------------------------------- one process
def _tried(recipe: str, sets: Sequence[str], size: int, ranks: int, budget: int | None, room: int | None) -> Try:
    command = [sys.executable, "-P", "-m", "ddpforge", *(["run"] if ranks == 1 else ["launch"]), recipe, "--json"]
    command += [
        f"--dry-run={_STEPS}",
        *(["--nproc", str(ranks)] if ranks > 1 else []),
        *(f"--set={one}" for one in sets),
    ]
    code, out, err = _watched(command, budget if ranks == 1 and budget is not None else room)
    said = _last_object(out)
    if code == 0 and "memory" in said:
        fits = budget is None or said["memory"] <= budget
        return Try(size, fits, said["memory"], said["samples_per_second"] if fits else None)
    killed = code in (None, -9) or "(SIGKILL)" in err
    if killed or "OutOfMemory" in str(said.get("error", "")) or "memory is full" in err:
        return Try(size, fits=False)
    last_lines = [line for line in err.splitlines() if line.strip()][-8:]
    raise ForgeError(f"a micro-batch of {size} could not be tried (exit code {code})", hints=last_lines)


def _watched(command: Sequence[str], most: int | None) -> tuple[int | None, str, str]:
    """Runs a command; returns its exit code and its output.

    Kills the command if it takes more than `most` bytes of the machine's memory; the exit code is then None.
    """
    # A process that takes all of a machine's memory would end other processes, too.
    with TemporaryFile() as out, TemporaryFile() as err:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        ended = False
        try:
            while process.poll() is None:
                if most is not None and resident_memory(process.pid) > most and not opens_nvidia_gpu(process.pid):
                    ended = True
                    break
                time.sleep(_LOOK)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        texts = out.read().decode(errors="replace"), err.read().decode(errors="replace")
        return None if ended else process.returncode, *texts


def _last_object(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return {}
