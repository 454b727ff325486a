"""Runs contenders in turn in threads of one process: one trains, all others wait.

The order is the same on every rank, so that all contenders can use the same process group; it is random in every round.
Wall and CPU time of a turn contain only its steps.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch import nn

__all__ = ["Relay", "Side"]


class Relay:
    """Schedule of turns of `steps` steps each for the contenders `names`; the last of them finishes last."""

    def __init__(self, names: Sequence[str], *, steps: int, turns: int) -> None:
        """Draws the order. The first turn, for set-up and warm-up, is not timed and not one of the `turns`."""
        self.steps, self.total = steps, steps * (1 + turns)
        draw = random.Random(0)
        rounds = [draw.sample(names, len(names)) for _ in range(1 + turns)]
        self._order = [*(name for each in rounds for name in each), *names]
        self._at = 0
        self._gates = {name: threading.Semaphore(0) for name in names}
        self._gates[self._order[0]].release()

    def take(self, name: str) -> None:
        """Waits for the turn of `name`."""
        self._gates[name].acquire()

    def hand_over(self) -> None:
        """Starts the next turn."""
        self._at += 1
        if self._at < len(self._order):
            self._gates[self._order[self._at]].release()


class Side:
    """Side of one contender in the relay. The contender calls `done` after every step."""

    def __init__(self, relay: Relay, name: str, probe: Callable[[nn.Module], float]) -> None:
        self.relay, self.name, self.total = relay, name, relay.total
        self.turns: list[tuple[float, float]] = []  # wall and CPU seconds per step
        self.probed: float | None = None  # result of `probe` for the model after the first turn
        self._probe = probe
        self._done = 0
        self._began = (0.0, 0.0)

    def done(self, model: nn.Module | None = None) -> None:
        """Counts a step; at the end of a turn waits for the next turn. Probes a whole `model` after the first turn."""
        self._done += 1
        if self._done % self.relay.steps:
            return
        wall, cpu = _clocks()
        if self._done > self.relay.steps:
            self.turns.append(((wall - self._began[0]) / self.relay.steps, (cpu - self._began[1]) / self.relay.steps))
        elif model is not None:
            self.probed = self._probe(model)
        self.relay.hand_over()
        self.relay.take(self.name)
        if self._done < self.total and dist.is_initialized():
            _schedule_gloo()
            dist.barrier()  # no clock starts while another rank is still in the previous turn
        self._began = _clocks()


def _schedule_gloo() -> None:
    """Gives the shared threads of gloo the scheduling policy of this contender's thread."""
    policy, threads = os.sched_getscheduler(0), 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            if "gloo" in (task / "comm").read_text():
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
                threads += 1
    if not threads:
        raise RuntimeError("found no thread of gloo in this process, so its scheduling policy cannot be set")


def _clocks() -> tuple[float, float]:
    """Returns wall time, and the CPU time of all threads of this process."""
    return time.perf_counter(), time.process_time()
