"""Host's time of a step on the MLP, next to a loop by hand, on the pretended CUDA device of tests/pretend_cuda.

    python benchmarks/host_time.py [--turns 41] [--steps 50] [--precision fp32]

Kernels do nothing, so that a step takes the time in which the host queues its work: a small model on a fast GPU waits
for that. Both sides train in turns in one process, between two logged rows. Printed are medians of all turns but the
first, in CPU time of all threads, which other processes disturb least, and the median ratio of neighbouring turns. Only
the ratio means something: this device answers faster than a driver.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

RECIPE = """
recipe = 2
name = "host-time"
[model]
use = "mlp"
inputs = 64
outputs = 10
hidden = [2048, 2048]
[data.train]
use = "./counted.py:Features"
[task]
use = "classification"
[optimizer]
use = "adamw"
lr = 1e-3
[strategy]
use = "single"
[train]
length = "{length}st"
global_batch = 64
clip_norm = 1.0
precision = "{precision}"
[track]
every = "100000st"
[checkpoint]
every = "100000st"
[callbacks.turns]
use = "./host_time.py:Turns"
turns = {turns}
steps = {steps}
precision = "{precision}"
"""


def by_hand(precision: str) -> Iterator[None]:
    """Yields after each step."""
    import torch
    from support.counted import WORKS, batches, model_of
    from torch import nn

    work, place = WORKS["mlp"], torch.device("cuda", 0)
    model = model_of("mlp").to(place)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for x, y in batches(work.data(), work.batch):
        x, y = x.to(place, non_blocking=True), y.to(place, non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


class Turns:
    """Callback of a run: after `steps` steps, the loop by hand takes as many. Prints the times at the end."""

    def __new__(cls, *, turns: int, steps: int, precision: str) -> object:
        """Returns the callback; ddpforge is imported only in the process that trains."""
        from ddpforge.interfaces import Callback, StepInfo

        class Relay(Callback):
            """Measures both sides."""

            def __init__(self) -> None:
                self.hand = by_hand(precision)
                self.found: dict[str, list[float]] = {"by hand": [], "ddpforge": []}

            def on_step(self, info: StepInfo) -> None:
                """Ends a turn of the run, and takes one of the loop by hand."""
                now = time.process_time()
                if info.step % steps:
                    return
                if info.step > steps:
                    self.found["ddpforge"].append((now - self.began) / steps)
                for _ in range(steps):
                    next(self.hand)
                if info.step > steps:
                    self.found["by hand"].append((time.process_time() - now) / steps)
                if info.step == turns * steps:
                    report(self.found)
                self.began = time.process_time()

        return Relay()


def report(found: dict[str, list[float]]) -> None:
    """Prints both medians and the ratio, and ends the process: a checkpoint of such weights would fail."""
    middle = {name: median(times) for name, times in found.items()}
    for name, times in found.items():
        spread = f"{min(times) * 1e6:.0f} to {max(times) * 1e6:.0f}"
        print(f"{name:>9}: {middle[name] * 1e6:.0f} µs of CPU a step (median of {len(times)} turns, {spread})")
    ratios = [ours / hand for ours, hand in zip(found["ddpforge"], found["by hand"], strict=True)]
    print(f"    ratio: {median(ratios):.2f}", flush=True)
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    options = parser.parse_args()
    from support.pretended import environment, with_changes

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in (Path(__file__), ROOT / "tests/support/counted.py"):
            (folder / file.name).write_text(file.read_text())
        recipe = RECIPE.format(length=options.turns * options.steps, **vars(options))
        (folder / "run.toml").write_text(recipe)
        env = with_changes(environment(1, computes=False))
        env["PYTHONPATH"] += f":{ROOT / 'tests'}"
        command = [sys.executable, "-m", "ddpforge", "run", "run.toml", "--fresh", "--json"]
        return subprocess.run(command, cwd=folder, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
