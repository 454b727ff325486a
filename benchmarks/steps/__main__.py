"""Time per optimizer step of ddpforge and other tools, relative to a loop written by hand.

    make bench                                                  everything, in half an hour on two cores
    python benchmarks/steps --models gpt --ranks 2 --turns 30   a part of it, with less noise
    python benchmarks/steps --others                            only ddpforge and the loop by hand
    python benchmarks/steps --fused                             all contenders use torch's fused AdamW, as ddpforge does
    python benchmarks/steps --clip 0                            only ddpforge computes the gradient's norm

All contenders of a row run in one process per rank, each in its own thread. They train in turn, for a fixed number of
steps per turn, in a random order in every round. Only one computes at a time, so other load of the machine affects all
contenders equally. Every ratio compares two turns of the same round; the script prints its median and quartiles. CPU
time is that of all threads of a rank, averaged over ranks. "by hand again" is the loop by hand a second time: its
distance from 1 is the measurement error.

All contenders use torch's AdamW as in their documentation, in fp32, on CPUs, over gloo, without loader processes. They
clip the gradient to norm 1, and print the loss every 10 steps. On one rank, the loop by hand trains a bare model
without a process group. ddpforge runs a recipe, with metrics.jsonl, console and all checks on. After the first turn,
which is not timed, the models' losses must agree.

All contenders share gloo's threads. In each turn these have the scheduling policy that the contender's own process
would give them: SCHED_BATCH for ddpforge, the default of Linux for the others.

For all contenders glibc keeps freed memory; otherwise its behaviour would change results by several per cent. The
script writes steps.json, with every turn, and steps.png.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from work import MODELS

HAND = "by hand"
OTHERS = ("by hand again", "by hand, tuned", "Accelerate", "Fabric", "Lightning", "HF Trainer")
SHARDED = ("fsdp", "zero1", "zero2", "zero3")  # against their loops by hand, for the GPT on several ranks
PACKAGES = ("ddpforge", "torch", "torchvision", "accelerate", "lightning", "transformers", "deepspeed")
AGREE = 0.05  # allowed relative difference of losses after the first turn; the order of samples differs

SETTINGS = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(2**32),
    "MALLOC_TRIM_THRESHOLD_": str(2**33),
    "ACCELERATE_USE_CPU": "true",
    "CUDA_VISIBLE_DEVICES": "",
    "DS_ACCELERATOR": "cpu",
}


class Row(NamedTuple):
    """Row of the table: one session."""

    work: str
    ranks: int
    strategy: str

    def __str__(self) -> str:
        return f"{self.work}, {self.strategy}, {self.ranks} rank{'s' * (self.ranks > 1)}"


class Spread(NamedTuple):
    """Quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        if len(values) < 2:
            return cls(*values * 3)
        return cls(*statistics.quantiles(values, n=4, method="inclusive"))

    def __str__(self) -> str:
        return f"{self.median:6.3f} ({self.low:.3f} to {self.high:.3f})"


class Found(NamedTuple):
    """Results of a contender in a session: milliseconds per step, and ratios to the loop by hand."""

    wall: float
    ratio: Spread
    cpu: float
    cpu_ratio: Spread


def measure(row: Row, others: list[str], turns: int | None, clip: float, *, fused: bool) -> dict[str, Any]:
    """Runs a session on new ranks; returns the (wall, CPU) seconds per step of every turn, by contender."""
    work = MODELS[row.work]
    with tempfile.TemporaryDirectory() as folder:
        asked = {**row._asdict(), "others": others, "turns": turns or work.turns, "clip": clip, "fused": fused}
        asked["folder"] = folder
        command = [sys.executable]
        if row.ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.ranks}"]
        command += [str(Path(__file__).with_name("rank.py")), json.dumps(asked)]
        threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // row.ranks))}
        environment = os.environ | SETTINGS | threads
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{row} failed:\n{done.stdout[-4000:]}{done.stderr[-8000:]}")
        ranks = [json.loads((Path(folder) / f"rank-{rank}.json").read_text()) for rank in range(row.ranks)]
    _compare_losses(row, {name: side["loss"] for name, side in ranks[0].items()})
    return {
        name: [
            (side["turns"][turn][0], statistics.mean(rank[name]["turns"][turn][1] for rank in ranks))
            for turn in range(len(side["turns"]))
        ]
        for name, side in ranks[0].items()
    }


def _compare_losses(row: Row, losses: dict[str, float | None]) -> None:
    told = {name: loss for name, loss in losses.items() if loss is not None}
    if max(told.values()) > (1 + AGREE) * min(told.values()):
        sys.exit(f"{row}: the contenders did different work; losses after the first turn: {told}")


def compare(turns: dict[str, Any]) -> dict[str, Found]:
    """Compares every contender with the loop by hand."""
    found = {}
    for name, mine in turns.items():
        (wall, cpu), (ratio, cpu_ratio) = (
            [statistics.median(turn[clock] for turn in mine) * 1e3 for clock in (0, 1)],
            [Spread.of([a[clock] / b[clock] for a, b in zip(mine, turns[HAND], strict=True)]) for clock in (0, 1)],
        )
        found[name] = Found(wall, ratio, cpu, cpu_ratio)
    return found


def table(rows: dict[Row, dict[str, Found]]) -> str:
    """Returns all rows as a Markdown table: ratios of wall time and of CPU time."""
    names = [name for name in ("ddpforge", *OTHERS) if any(name in found for found in rows.values())]
    lines = [
        f"| Model | Strategy | Ranks | By hand, ms | {' | '.join(names)} |",
        f"| {' | '.join(['---'] * (4 + len(names)))} |",
    ]
    for row, found in rows.items():
        cells = [
            f"{found[name].ratio.median:.2f} / {found[name].cpu_ratio.median:.2f}" if name in found else ""
            for name in names
        ]
        hand = found[HAND].wall
        lines.append(
            f"| {row.work} | {row.strategy} | {row.ranks} | {hand:.{3 if hand < 10 else 1}f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines)


def draw(rows: dict[Row, dict[str, Found]], file: Path) -> None:
    """Draws medians and quartiles of the ratios of wall time."""
    from matplotlib import pyplot

    names = [name for name in (HAND, "ddpforge", *OTHERS) if any(name in found for found in rows.values())]
    figure, axes = pyplot.subplots(figsize=(9, 0.5 + 0.7 * len(rows)), layout="constrained")
    for place, name in enumerate(names):
        points = [(index, found[name].ratio) for index, (_, found) in enumerate(rows.items()) if name in found]
        heights = [index + 0.8 * (place / len(names) - 0.45) for index, _ in points]
        bars = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
        axes.errorbar([s.median for _, s in points], heights, xerr=bars, fmt="o", markersize=4, label=name)
    axes.axvline(1, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [str(row) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("time per step ÷ time of the loop by hand: medians and quartiles")
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=150)


def facts() -> dict[str, Any]:
    """Returns versions, machine and command; exits with 2 if a package is missing."""
    try:
        versions = {package: version(package) for package in PACKAGES}
    except PackageNotFoundError as error:
        print(f"error: {error.name} is not installed; run pip install '.[bench]'", file=sys.stderr)
        sys.exit(2)
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "command": shlex.join(["python", "benchmarks/steps", *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": versions,
        "machine": names[0].partition(": ")[2] if names else platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2, 4, 8), default=[1, 2])
    parser.add_argument("--strategies", nargs="+", choices=("ddp", *SHARDED), default=["ddp", *SHARDED])
    parser.add_argument(
        "--others",
        nargs="*",
        choices=OTHERS,
        default=list(OTHERS),
        help="contenders besides ddpforge and the loop by hand",
    )
    parser.add_argument("--clip", type=float, default=1.0, help="maximum norm of the gradient; 0: no clipping")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW for all contenders, as in ddpforge")
    parser.add_argument("--turns", type=int, help="timed turns of every contender; more reduce noise")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder of steps.json and steps.png")
    options = parser.parse_args()
    if options.turns is not None and options.turns < 1:
        parser.error("--turns: must be 1 or more")

    told = facts()
    print(f"{told['machine']}, {told['cores']} cores, load {told['load']:.1f}; {told['command']}")
    print(", ".join(f"{name} {number}" for name, number in {"Python": told["python"], **told["versions"]}.items()))
    plan = [
        Row(work, ranks, strategy)
        for work in options.models
        for strategy in options.strategies
        for ranks in options.ranks
        if strategy == "ddp" or (work == "gpt" and ranks > 1)
    ]
    rows, sessions = {}, []
    for row in plan:
        load = os.getloadavg()[0]
        turns = measure(row, options.others, options.turns, options.clip, fused=options.fused)
        rows[row] = compare(turns)
        sessions.append({**row._asdict(), "load": load, "turns": turns})
        print(f"\n{row}: {MODELS[row.work].title}; {len(turns[HAND])} turns of {MODELS[row.work].steps} steps")
        for name, (wall, ratio, cpu, cpu_ratio) in rows[row].items():
            print(f"  {name:14} {wall:8.3f} ms {ratio.median:6.3f} ({ratio.low:.3f} to {ratio.high:.3f})", end="")
            print(
                f"   CPU {cpu:8.3f} ms {cpu_ratio.median:6.3f} ({cpu_ratio.low:.3f} to {cpu_ratio.high:.3f})",
                flush=True,
            )
    print(f"\n{table(rows)}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "steps.json").write_text(json.dumps({**told, "sessions": sessions}, indent=1))
    draw(rows, options.out / "steps.png")
    print(f"\n{options.out / 'steps.json'}, {options.out / 'steps.png'}")


main()
