"""Cost of the watchdog: heartbeats in training, and the watchdog process of each rank.

    python benchmarks/watch.py

Prints the time of a heartbeat, its share of a step of 1 ms (six heartbeats), and the CPU time and memory of the
watchdog process. Only the heartbeats run in the rank itself.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import timeit
from pathlib import Path

import psutil
import torch

from ddpforge.interfaces import RunAttempt
from ddpforge.ranks import heartbeat
from ddpforge.watchdog.watchdog import Watchdog

MARKS = 6  # heartbeats of a step with one micro-batch: data, forward, backward, step, reduce, callbacks
SECONDS = 20


def nanoseconds(statement: str) -> float:
    best = min(
        timeit.repeat(
            statement, globals={"heartbeat": heartbeat, "nothing": lambda phase: None}, number=50_000, repeat=40
        )
    )
    return best / 50_000 * 1e9


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "logs").mkdir()
        attempt = RunAttempt(
            folder=Path(name),
            token="bench",
            rank=0,
            size=2,
            device=torch.device("cpu"),
            strategy="ddp",
            hang_timeout=600.0,
            compiles=False,
        )
        with Watchdog(attempt):
            mark, call = nanoseconds("heartbeat.beat(heartbeat.FORWARD)"), nanoseconds("nothing(heartbeat.FORWARD)")
            print(f"heartbeat: {mark:.0f} ns (an empty call: {call:.0f} ns)")
            print(f"{MARKS} heartbeats per step: {MARKS * mark / 1e6:.3%} of a step of 1 ms")
            (beside,) = psutil.Process(os.getpid()).children()
            start = sum(beside.cpu_times()[:2])
            time.sleep(SECONDS)
            spent = (sum(beside.cpu_times()[:2]) - start) / SECONDS
            print(
                f"watchdog process: {start * 1e3:.0f} ms of CPU to start, then {spent * 1e3:.1f} ms per second,",
                end=" ",
            )
            print(f"{beside.memory_info().rss / 2**20:.0f} MiB")


if __name__ == "__main__":
    sys.exit(main())
