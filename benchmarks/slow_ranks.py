"""Plants a slow rank in runs on this machine, and counts the runs that name it; also runs without one.

    python benchmarks/slow_ranks.py                        # 50 planted runs and 10 minutes of quiet ones
    python benchmarks/slow_ranks.py --planted 10 --quiet 60

Each planted run has a rank, a cause and a strength drawn by the seed:

- disk: the dataset waits on each read of this rank.
- loader: the loader's processes of this rank take longer for a batch.
- processes: four busy processes run on the core of this rank. Each of the two ranks has a core of its own.
- compute: the forward pass of this rank repeats its products.
- callback: a callback of this rank waits after each step.

A run is right if it names this rank and no other, with a part that fits: busy processes slow all parts down. Runs of
two ranks compute as fast as they can. In runs of four, most of a step is a wait, because four busy ranks on two cores
would slow each other down. Quiet runs are these without a cause, under the load that the machine has.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CODE = """
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

from ddpforge.interfaces import Callback

PLAN = json.loads(Path(__file__).with_name("plan.json").read_text())
SLOW = int(os.environ.get("RANK", 0)) == PLAN["rank"]
if PLAN["pinned"]:
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[int(os.environ["RANK"]) % 2]})


def extra(cause):
    return PLAN["seconds"] if SLOW and PLAN["cause"] == cause else 0.0


class Data:
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        time.sleep(PLAN["base"] / 4 + extra("disk") + extra("loader"))
        return [(torch.full((64,), float(i % 7)), i % 3) for i in indices]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 384), nn.Tanh(), nn.Linear(384, 384), nn.Tanh(), nn.Linear(384, 3))

    def forward(self, x):
        time.sleep(PLAN["base"])
        end = time.perf_counter() + extra("compute")
        while time.perf_counter() < end:
            self.layers[2].weight @ self.layers[2].weight
        return self.layers(x)


class Waits(Callback):
    def on_step(self, info) -> None:
        time.sleep(extra("callback"))
"""
RECIPE = """
recipe = 2
name = "run"
[model]
use = "./parts.py:Net"
[data]
workers = {workers}
[data.train]
use = "./parts.py:Data"
[task]
use = "classification"
[optimizer]
use = "sgd"
lr = 0.01
[callbacks.waits]
use = "./parts.py:Waits"
[train]
length = "{seconds}s"
global_batch = {batch}
device = "cpu"
[checkpoint]
every = "1h"
[track]
every = "{every}st"
"""
PARTS = {
    "disk": {"data"},
    "loader": {"data"},
    "processes": {"data", "compute", "other"},
    "compute": {"compute"},
    "callback": {"other"},
}


class Plan(NamedTuple):
    """A planted rank: the cause adds `seconds` to each step; `cause` is empty in a quiet run."""

    cause: str
    rank: int
    ranks: int
    seconds: float
    base: float
    every: int

    @classmethod
    def drawn(cls, number: int, seed: int, *, quiet: bool = False) -> Plan:
        draw = random.Random(f"{seed}/{number}")
        cause = "" if quiet else list(PARTS)[number % len(PARTS)]
        ranks = 2 if cause in ("processes", "compute") or number % 2 else 4
        base = 0.0 if cause == "processes" or (quiet and ranks == 2) else 0.02
        # On top of about 30 ms of work per step. A loader works ahead, so that only what exceeds a step is late.
        seconds = draw.uniform(0.03, 0.09) + (0.03 if cause == "loader" else 0)
        return cls(cause, draw.randrange(ranks), ranks, seconds, base, draw.choice([1, 10, 50]))


@contextmanager
def busy(plan: Plan) -> Iterator[None]:
    """Runs busy processes on the core of the planted rank, if that is the cause."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[plan.rank % 2 % len(cores)]
    started = [
        multiprocessing.get_context("fork").Process(target=spin, args=(core, os.getpid()), daemon=True)
        for _ in range(4 * (plan.cause == "processes"))
    ]
    try:
        for one in started:
            one.start()
        yield
    finally:
        for one in started:
            one.kill()
            one.join()


def spin(core: int, parent: int) -> None:
    os.setsid()  # Linux gives each session an equal share of a core
    os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        sum(range(100_000))


def run(plan: Plan, seconds: float) -> tuple[list[dict[str, object]], int]:
    """Trains for `seconds`; returns the ranks that the run has named, and its steps."""
    with tempfile.TemporaryDirectory() as name, busy(plan):
        folder = Path(name)
        pinned = plan.cause == "processes" and len(os.sched_getaffinity(0)) > 1
        (folder / "plan.json").write_text(json.dumps(plan._asdict() | {"pinned": pinned}))
        (folder / "parts.py").write_text(CODE)
        batch = 2048 * plan.ranks if plan.base == 0 else 64 * plan.ranks
        (folder / "run.toml").write_text(
            RECIPE.format(seconds=seconds, batch=batch, every=plan.every, workers=int(plan.cause == "loader"))
        )
        command = [sys.executable, "-m", "ddpforge", "launch", "run.toml", "--nproc", str(plan.ranks)]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as launched,
        ):
            try:
                code = launched.wait(seconds + 240)
            finally:
                launched.terminate()  # it ends its ranks
        if code:
            raise RuntimeError((folder / "log").read_text()[-3000:])
        found = folder / "runs/run/slow_ranks.json"
        status = json.loads((folder / "runs/run/status.json").read_text())
        return (json.loads(found.read_text())["named"] if found.exists() else []), status["step"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", type=int, default=50, help="number of planted runs")
    parser.add_argument("--quiet", type=float, default=600, metavar="SECONDS", help="seconds of runs without a cause")
    parser.add_argument("--seconds", type=float, default=15, help="seconds of a planted run")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    right = 0
    for number in range(given.planted):
        plan = Plan.drawn(number, given.seed)
        named, steps = run(plan, given.seconds)
        good = [one["rank"] for one in named] == [plan.rank] and named[0]["part"] in PARTS[plan.cause]
        right += good
        told = "; ".join(f"rank {one['rank']} {one['factor']:.2f} x, {one['part']}" for one in named) or "no rank"
        shown = f"{number} {plan.cause} rank {plan.rank} of {plan.ranks} +{plan.seconds * 1e3:.0f} ms, {steps} steps"
        print(f"{'right' if good else 'WRONG'}  {shown}: {told}", flush=True)
    if given.planted:
        print(f"{right} of {given.planted} planted slow ranks are named right", flush=True)
    steps, false, number, ends = 0, 0, 0, time.monotonic() + given.quiet
    while time.monotonic() < ends:
        plan = Plan.drawn(number, given.seed, quiet=True)
        named, some = run(plan, min(60, max(5, ends - time.monotonic())))
        steps, false, number = steps + some, false + len(named), number + 1
        for one in named:
            print(f"false alarm on {plan.ranks} ranks, base {plan.base}: {one['text']}", flush=True)
    if number:
        print(f"{false} false alarms in {steps} steps of {number} quiet runs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
