"""Start-up cost of ddpforge: its commands, and a run up to the end of its first step.

    python benchmarks/startup.py
    python benchmarks/startup.py --what steps --repeats 15
    python benchmarks/startup.py --what commands --distributions 1000 --plugins 100

Commands: CPU and wall time, compared with an empty click command. In addition to the distributions of the environment,
a temporary folder contains `--distributions` made-up distributions, `--plugins` of them with a component of ddpforge.
Prints medians, in milliseconds, and the difference from the empty command.

Steps: CPU and wall seconds from the command to the end of the first optimizer step on rank 0, for a recipe and for a
script written by hand that trains the same MLP on the same digits: in one process, and in two processes with `ddpforge
launch` and torchrun. CPU time is that of all processes of the command, including launchers and watchdogs. Both run
alternately in new processes. Prints medians, and median and quartiles of the ratios of successive runs.
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from ddpforge.builtin.datasets import digits

EMPTY = "import click\n\n\n@click.command()\ndef main():\n    pass\n\n\nmain()\n"
OURS = "from ddpforge.cli import main; main()"
METADATA = (
    "Metadata-Version: 2.4\nName: {name}\nVersion: 1.0\n"
    + "Requires-Dist: another-library>=1\n" * 40
    + "\n"
    + "text\n" * 500
)

RECIPE = """
recipe = 2
name = "bench"
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
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "1000st"
global_batch = 64
device = "cpu"
[callbacks.first]
use = "./first.py:First"
"""
FIRST = '''
import os, time
from ddpforge.interfaces import Callback

class First(Callback):
    """Writes a file after the first step, and waits to be killed."""

    def on_step(self, info):
        if os.environ.get("RANK", "0") == "0":
            open("done", "w").close()
        time.sleep(60)
'''
BY_HAND = """
import os, time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ranks = int(os.environ.get("WORLD_SIZE", "1"))
if ranks > 1:
    dist.init_process_group("gloo")
torch.manual_seed(0)
table = np.loadtxt("digits.csv.gz", delimiter=",", dtype=np.uint8)
data = TensorDataset(torch.from_numpy(table[:, :64]).float() / 16, torch.from_numpy(table[:, 64]).long())
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if ranks > 1:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
sampler = DistributedSampler(data) if ranks > 1 else None
for inputs, targets in DataLoader(data, 64 // ranks, sampler=sampler, shuffle=sampler is None):
    loss = cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if os.environ.get("RANK", "0") == "0":
        print(f"loss {loss.item():.4f}")
        open("done", "w").close()
    time.sleep(60)
"""


def install(folder: Path, distributions: int, plugins: int) -> None:
    """Writes metadata like that of pip, with entry points in the plugins and in every third other distribution."""
    for number in range(distributions):
        name = f"made_up_{number}"
        home = folder / f"{name}-1.0.dist-info"
        home.mkdir()
        (home / "METADATA").write_text(METADATA.format(name=name))
        (home / "RECORD").write_text("".join(f"{name}/module_{n}.py,sha256=0,1\n" for n in range(200)))
        if number < plugins:
            (home / "entry_points.txt").write_text(f"[ddpforge.model]\n{name} = {name}:Model\n")
        elif number % 3 == 0:
            (home / "entry_points.txt").write_text(f"[console_scripts]\n{name} = {name}:main\n")


def cost(command: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Returns the CPU and wall seconds of one process."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def to_first_step(command: list[str], folder: Path) -> tuple[float, float]:
    """Returns the CPU and wall seconds of a command and its children until the file `done` exists; then kills them."""
    done, log = folder / "done", folder / "log"
    done.unlink(missing_ok=True)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with log.open("w") as output:
        began = time.perf_counter()
        started = psutil.Popen(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while not done.exists():
            if started.poll() is not None:
                sys.exit(f"{shlex.join(command)} ended before its first step:\n{log.read_text()}")
            time.sleep(0.01)
        wall = time.perf_counter() - began
    family = [started, *started.children(recursive=True)]
    times = [each.cpu_times() for each in family]
    for each in family:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(family)
    return sum(sum(each[:4]) for each in times), wall  # user and system time, of a process and of its ended children


def steps_table(repeats: int) -> None:
    """Prints the cost of a first step, compared with a loop by hand."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    ddpforge = [sys.executable, "-m", "ddpforge"]
    rows = {
        1: ([sys.executable, "by_hand.py"], [*ddpforge, "run", "bench.toml"]),
        2: (
            [*torchrun, "--nproc-per-node=2", "by_hand.py"],
            [*ddpforge, "launch", "bench.toml", "--nproc", "2"],
        ),
    }
    print(f"{'ranks':>5} {'':9} {'CPU s':>7} {'ratio':>23} {'wall s':>7} {'ratio':>23}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, text in {"bench.toml": RECIPE, "first.py": FIRST, "by_hand.py": BY_HAND}.items():
            (folder / file).write_text(text)
        shutil.copy(Path(digits.__file__).with_name("digits.csv.gz"), folder)
        for ranks, commands in rows.items():
            # The first run, not counted, compiles bytecode and fills the page cache.
            turns = [[to_first_step(command, folder) for command in commands] for _ in range(1 + repeats)][1:]
            for side, title in enumerate(("by hand", "ddpforge")):
                cells = []
                for clock in (0, 1):
                    seconds = statistics.median(turn[side][clock] for turn in turns)
                    ratios = [turn[side][clock] / turn[0][clock] for turn in turns]
                    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
                    cells.append(f"{seconds:7.2f} {f'{middle:.2f} ({low:.2f} to {high:.2f})':>23}")
                print(f"{ranks:5} {title:9}", *cells, flush=True)


def commands_table(distributions: int, plugins: int, repeats: int) -> None:
    """Prints the cost of cheap commands, compared with an empty one."""
    commands = {
        "empty click": [sys.executable, "-c", EMPTY],
        "--help": [sys.executable, "-c", OURS, "--help"],
        "plugins list": [sys.executable, "-c", OURS, "plugins", "list"],
    }
    with tempfile.TemporaryDirectory() as folder:
        install(Path(folder), distributions, plugins)
        found = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        environment = os.environ | {"PYTHONPATH": found}
        rounds = [{name: cost(each, environment) for name, each in commands.items()} for _ in range(repeats)]

    print(f"{'':14} {'CPU ms':>8} {'more':>7} {'wall ms':>8} {'more':>7}")
    empty = [statistics.median(each["empty click"][clock] for each in rounds) * 1e3 for clock in (0, 1)]
    for name in commands:
        medians = [statistics.median(each[name][clock] for each in rounds) * 1e3 for clock in (0, 1)]
        columns = [f"{one:8.1f} {one - base:7.1f}" for one, base in zip(medians, empty, strict=True)]
        print(f"{name:14}", *columns)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=("commands", "steps"), default=["commands", "steps"])
    parser.add_argument("--distributions", type=int, default=100)
    parser.add_argument("--plugins", type=int, default=10, help="number of these that have a component")
    parser.add_argument("--repeats", type=int, help="2 or more; default: 30 for commands, 7 for steps")
    options = parser.parse_args()
    if options.repeats is not None and options.repeats < 2:
        parser.error("--repeats: must be 2 or more")
    if "commands" in options.what:
        commands_table(options.distributions, options.plugins, options.repeats or 30)
    if "steps" in options.what:
        steps_table(options.repeats or 7)


if __name__ == "__main__":
    main()
