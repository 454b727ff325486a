"""Lets contenders in threads of one process take turns: exactly one trains, all others wait.

On every rank they take turns in the same order, so that all may use the same process group; the order within a round
is drawn anew for every round. Wall and CPU time of a turn are those of its steps, and of nothing else.
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
    """Turns of so many `steps` for everybody in `names`; the last of them is the last to finish."""

    def __init__(self, names: Sequence[str], *, steps: int, turns: int) -> None:
        """The first turn, in which a contender is set up and warms up, is not one of the `turns` and not timed."""
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
        """Lets the next one in."""
        self._at += 1
        if self._at < len(self._order):
            self._gates[self._order[self._at]].release()


class Side:
    """A contender's side of the relay: it calls `done` after every step."""

    def __init__(self, relay: Relay, name: str, probe: Callable[[nn.Module], float]) -> None:
        self.relay, self.name, self.total = relay, name, relay.total
        self.turns: list[tuple[float, float]] = []  # wall and CPU seconds of a step
        self.probed: float | None = None  # what `probe` says of the model after the first turn
        self._probe = probe
        self._done = 0
        self._began = (0.0, 0.0)

    def done(self, model: nn.Module | None = None) -> None:
        """One more step is done; at the end of a turn it waits for the next one. A whole `model` is probed once."""
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
            dist.barrier()  # nobody's time begins while another rank is still in the turn before
        self._began = _clocks()


def _schedule_gloo() -> None:
    """Gives gloo's threads, which all share, the policy that this contender's own process would give to its own."""
    policy, threads = os.sched_getscheduler(0), 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            if "gloo" in (task / "comm").read_text():
                os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
                threads += 1
    if not threads:
        raise RuntimeError("no thread of this process is named after gloo, whose threads take the policy of each turn")


def _clocks() -> tuple[float, float]:
    """Wall time, and the CPU time of all threads of this process."""
    return time.perf_counter(), time.process_time()
