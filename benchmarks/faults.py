"""Seconds from a fault of one rank to the end of the whole job, and the rank that is blamed: ddpforge and others.

    python benchmarks/faults.py                                   all tools and faults, on 2 ranks
    python benchmarks/faults.py --tools ddpforge --faults data --ranks 1
    pip install '.[bench]'                                        installs Lightning

Every tool trains the same small network with gloo and a timeout of `--limit` seconds: `train.hang_timeout` of ddpforge,
for the others the timeout of the process group, the only one that they have (default on gloo: 30 minutes). The script
kills a job that still runs `--patience` seconds after the fault. "Named" is the rank that the last lines of the
output blame: the "Root Cause" of torchrun, or the last error of ddpforge.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

STRIKE = '''
import ctypes, os, signal, threading, time
from pathlib import Path

FAULT, RANK = os.environ["FAULT"], os.environ["FAULT_RANK"]
calls = 0


def strike(place):
    """Causes the fault at the twentieth call on one rank."""
    global calls
    if os.environ.get("RANK") != RANK or place != ("data" if FAULT == "data" else "forward"):
        return
    calls += 1
    if calls != 20:
        return
    Path("struck").write_text(str(time.time()))
    if FAULT == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if FAULT == "frozen":
        os.kill(os.getpid(), signal.SIGSTOP)
    if FAULT == "gil":
        ctypes.PyDLL(None).sleep(3600)
    threading.Event().wait()
'''
PARTS = """
import torch
from strike import strike
from torch import nn
from torch.utils.data import Dataset


class Points(Dataset):
    random = False

    def __len__(self):
        return 4096

    def __getitem__(self, index):
        if index % 4 == 0:
            strike("data")
        return torch.full((16,), index / 4096), index % 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        if self.training:
            strike("forward")
        return self.layers(x)
"""
ACCELERATE = """
import sys
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from parts import Net, Points

waits = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=float(sys.argv[1])))
accelerator = Accelerator(cpu=True, kwargs_handlers=[waits])
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
net, optimizer, data = accelerator.prepare(net, optimizer, torch.utils.data.DataLoader(Points(), batch_size=4))
while True:
    for x, y in data:
        loss = torch.nn.functional.cross_entropy(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
LIGHTNING = """
import sys
from datetime import timedelta

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from parts import Net, Points


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=float(sys.argv[1])))
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
trainer = L.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=-1, **quiet)
trainer.fit(Module(), torch.utils.data.DataLoader(Points(), batch_size=4))
"""
RECIPE = """
recipe = 2
name = "run"
model = {{ use = "./parts.py:Net" }}
data.train = {{ use = "./parts.py:Points" }}
task = {{ use = "classification" }}
optimizer = {{ use = "sgd", lr = 0.1 }}
train = {{ length = "100000ep", global_batch = 8, hang_timeout = "{limit}s" }}
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def command(tool: str, folder: Path, limit: int) -> list[str]:
    (folder / "strike.py").write_text(STRIKE)
    (folder / "parts.py").write_text(PARTS)
    if tool == "ddpforge":
        (folder / "run.toml").write_text(RECIPE.format(limit=limit))
        return [sys.executable, "-m", "ddpforge", "launch", "run.toml", "--nproc", "2"]
    (folder / "peer.py").write_text({"accelerate": ACCELERATE, "lightning": LIGHTNING}[tool])
    return [*TORCHRUN, "peer.py", str(limit)]


def end(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all its children."""
    for one in [*psutil.Process(process.pid).children(recursive=True), process]:
        one.kill()
    process.wait()


def wait(process: subprocess.Popen[bytes], deadline: float) -> bool:
    """True if the process, and with it the ranks, ended before `deadline`; otherwise kills it."""
    while process.poll() is None:
        if time.time() > deadline:
            end(process)
            return False
        time.sleep(0.1)
    return True


def named(said: str) -> str:
    """Returns the rank that the output blames last, or "none"."""
    root = re.findall(r"Root Cause.*?rank\s*:\s*(\d+)", said, re.S) or re.findall(r"error: rank (\d+)", said)
    return root[-1] if root else "none"


def measure(tool: str, fault: str, rank: int, *, limit: int, patience: int) -> tuple[float | None, str, int]:
    """Returns the seconds until the job ended (None: never), the rank that was blamed, and the lines of output."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {"FAULT": fault, "FAULT_RANK": str(rank), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        with (folder / "said").open("wb") as said:
            process = subprocess.Popen(
                command(tool, folder, limit), cwd=folder, env={**os.environ, **variables}, stdout=said, stderr=said
            )
            struck = folder / "struck"
            started = time.time() + 300
            while not struck.exists() and process.poll() is None and time.time() < started:
                time.sleep(0.1)
            if not struck.exists() or not struck.read_text():
                if process.poll() is None:
                    end(process)
                sys.exit(f"{tool} did not train:\n{(folder / 'said').read_text()}")
            since = float(struck.read_text())
            over = wait(process, since + patience)
        seconds, text = time.time() - since, (folder / "said").read_text(errors="replace")
        return seconds if over else None, named(text), len(text.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", default="ddpforge,accelerate,lightning")
    parser.add_argument("--faults", default="killed,frozen,gil,data")
    parser.add_argument("--ranks", default="0,1")
    parser.add_argument("--limit", type=int, default=10)
    parser.add_argument("--patience", type=int, default=120)
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    print(f"{'tool':12} {'fault':8} {'rank':>4} {'seconds':>8} {'named':>6} {'lines':>6}", flush=True)
    for tool in asked.tools.split(","):
        if importlib.util.find_spec(tool) is None:
            print(f"{tool:12} is not installed: pip install '.[bench]'")
            continue
        for fault in asked.faults.split(","):
            for rank in map(int, asked.ranks.split(",")):
                seconds, who, lines = measure(tool, fault, rank, limit=asked.limit, patience=asked.patience)
                shown = f"> {asked.patience}" if seconds is None else f"{seconds:.1f}"
                print(f"{tool:12} {fault:8} {rank:4} {shown:>8} {who:>6} {lines:6}", flush=True)


if __name__ == "__main__":
    main()
