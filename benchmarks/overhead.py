"""Seconds per optimizer step of ddpforge ÷ a hand-written PyTorch DDP loop, on the same work in the same run.

    python benchmarks/overhead.py                 the table: two models, one and two processes
    python benchmarks/overhead.py --repeats 9     more pairs, steadier medians

The two sides take turns (A B A B …) in fresh processes, and the ratio is that of their medians. The hand-written
loop is the one of the PyTorch tutorials: DistributedSampler, DataLoader, DistributedDataParallel, `loss.item()` printed
every 10 steps. ddpforge runs a recipe as any user would, with metrics.jsonl and the console tracker on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WARM_UP = 50  # steps that are not timed: caches, allocator, autotuning

RECIPE = """
recipe = 1
name = "bench"
{model}
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "{steps}st"
global_batch = {batch}
[checkpoint]
every = "1000000st"
[callbacks.stopwatch]
use = "./stopwatch.py:Stopwatch"
warm_up = {warm_up}
"""

MODELS = {
    "mlp": """
[model]
use = "mlp"
inputs = 64
hidden = [64]
outputs = 10
[data.train]
use = "digits"
split = "train"
[task]
use = "classification"
""",
    "gpt": """
[model]
use = "gpt"
vocab_size = 256
block_size = 64
layers = 4
heads = 4
width = 128
[data.train]
use = "text"
split = "train"
block_size = 64
[task]
use = "language_modelling"
""",
}
WORK = {"mlp": (2000, 64), "gpt": (150, 16)}  # timed steps, global batch

STOPWATCH = '''
import json, os, time
from ddpforge.interfaces import Callback

class Stopwatch(Callback):
    """Times the steps after the warm-up."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up

    def on_step(self, info):
        if info.step == self.warm_up:
            self.began, self.first = time.perf_counter(), info.step
        self.last = info.step

    def on_end(self, error):
        seconds = (time.perf_counter() - self.began) / (self.last - self.first)
        if os.environ.get("RANK", "0") == "0":
            with open(os.environ["BENCH_RESULT"], "w") as file:
                json.dump(seconds, file)
'''


def by_hand(kind: str, steps: int, batch: int) -> None:
    """One rank of the hand-written loop."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from ddpforge.builtin.datasets.digits import Digits
    from ddpforge.builtin.datasets.text import Text
    from ddpforge.builtin.models.gpt import GPT
    from ddpforge.builtin.models.mlp import MLP

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    if kind == "mlp":
        data = Digits(split="train")
        dataset = TensorDataset(*data.__getitems__(list(range(len(data)))))
        model: torch.nn.Module = MLP(inputs=64, hidden=[64], outputs=10)
    else:
        text = Text(split="train", block_size=64)
        dataset = TensorDataset(*text.__getitems__(list(range(20_000))))
        model = GPT(vocab_size=256, block_size=64, layers=4, heads=4, width=128)

    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch // dist.get_world_size(), sampler=sampler)

    step, epoch, began = 0, 0, 0.0
    while step < steps + WARM_UP:
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            logits = model(inputs)
            loss = cross_entropy(logits.flatten(0, -2), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % 10 == 0 and dist.get_rank() == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step == WARM_UP:
                began = time.perf_counter()
            if step == steps + WARM_UP:
                break
        epoch += 1

    seconds = (time.perf_counter() - began) / steps
    if dist.get_rank() == 0:
        Path(os.environ["BENCH_RESULT"]).write_text(json.dumps(seconds))
    dist.destroy_process_group()


def measure(side: str, kind: str, nproc: int, folder: Path) -> float:
    """Seconds per step of one side, in fresh processes."""
    steps, batch = WORK[kind]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    if side == "ddpforge":
        recipe = folder / f"{kind}.toml"
        recipe.write_text(RECIPE.format(model=MODELS[kind], steps=steps + WARM_UP, batch=batch, warm_up=WARM_UP))
        (folder / "stopwatch.py").write_text(STOPWATCH)
        command = [*torchrun, "-m", "ddpforge", "run", str(recipe), "--fresh"]
    else:
        command = [*torchrun, str(Path(__file__).resolve()), "--by-hand", kind]

    result = folder / "result.json"
    threads = max(1, (os.cpu_count() or 1) // nproc)
    environment = os.environ | {"BENCH_RESULT": str(result), "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    seconds: float = json.loads(result.read_text())
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per row")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--nproc", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--by-hand", choices=list(MODELS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.by_hand:
        by_hand(options.by_hand, *WORK[options.by_hand])
        return

    print(f"{'model':6} {'ranks':>5} {'by hand, ms/step':>18} {'ddpforge, ms/step':>19} {'ratio':>7}")
    with tempfile.TemporaryDirectory() as name:
        for kind in options.models:
            for nproc in options.nproc:
                pairs = [
                    tuple(measure(side, kind, nproc, Path(name)) * 1e3 for side in ("by hand", "ddpforge"))
                    for _ in range(options.repeats)
                ]
                hand, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
                print(f"{kind:6} {nproc:5} {hand:18.3f} {ours:19.3f} {ours / hand:7.2f}", flush=True)


if __name__ == "__main__":
    main()
