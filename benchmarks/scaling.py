"""Scaling of ddpforge's costs with samples, parameters, checkpoints, rows of metrics, runs and ranks.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --what parameters ranks --repeats 5

All measurements take about four minutes. Every line shows the minimum over the repeats of the CPU seconds, which other
programs disturb less, and the power of the size with which they have grown since the previous line: 1 is linear, 0 is
constant. The script exits with 1 if the last power of any cost is more than 1.2. Tensors have 4 elements each, so only
the bookkeeping is measured, not disks and contents. Other ranks are simulated: they write their parts one after the
other, in this process.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from ddpforge.checkpoint import retention
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.checkpoint.writer import Writer, write
from ddpforge.data.batch_assignment import AssignmentTerms, BatchAssigner, RankShare
from ddpforge.interfaces import CanonicalState, Shuffled
from ddpforge.ranks.collectives import SingleRank
from ddpforge.ranks.writers import WriterGroup
from ddpforge.recipe.bundled import bundled
from ddpforge.recipe.schema import CheckpointSection, KeepSection
from ddpforge.runs.checkpoints import CheckpointFolder, rows
from ddpforge.runs.folder import RunFolder, Status
from ddpforge.runs.metrics import FILE, JSONLTracker, read_metrics
from ddpforge.runs.summary import differences, find_runs, notable, sorted_by, summarize

MOST = 1.2  # power of the size
STEPS = 200  # per measurement of the sampler

Costs = dict[str, float]  # seconds by action


def seconds(action: Callable[[], Any]) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


# ---------------------------------------------------------------------------------------------- samples
def samples(count: int, folder: Path) -> Costs:
    """Measures a step of 256 samples on rank 3 of 8, at the beginning of a run and late in it."""
    data = range(count)
    order = Shuffled(data, seed=1, global_batch=256, drop_last=True)
    terms = AssignmentTerms(global_batch=256, share=RankShare(3, 8, 32), seed=1, drop_last=True)
    dealer = BatchAssigner(order=order, samples=count, terms=terms)

    def steps(start: int) -> float:
        return seconds(lambda: list(islice(dealer.requests(start, None), STEPS))) / STEPS

    return {"a step of the first epoch": steps(0), "a step of epoch 1,000": steps(1_000 * order.steps_per_epoch)}


# ---------------------------------------------------------------------------------------------- parameters
def state_of(parameters: int) -> CanonicalState[torch.Tensor]:
    """Builds `parameters` parameters with AdamW's state."""
    names = [f"layers.{number}.weight" for number in range(parameters)]
    model = {name: torch.zeros(4) for name in names}
    moments = {
        name: {"step": torch.tensor(9.0), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)} for name in names
    }
    return CanonicalState(model, moments)


def facts_at(step: int, ranks: int = 1) -> CheckpointMetadata:
    return CheckpointMetadata(
        step=step, samples=step, strategy="ddp", world_size=ranks, metrics={"eval/loss": 1 / step}
    )


def parameters(count: int, folder: Path) -> Costs:
    """Measures a checkpoint of `count` parameters."""
    state = RankState.of(state_of(count))
    peers = WriterGroup.alone()
    settings = CheckpointSection(keep=KeepSection(last=2))
    checkpoints = Checkpoints(folder, settings, peers=peers, ranks=SingleRank())
    checkpoints.save(facts_at(1), state)
    checkpoints.wait()  # the first save allocates the buffers
    stalled = seconds(lambda: checkpoints.save(facts_at(2), state))
    written = seconds(checkpoints.wait)
    path = next(folder.glob("step-000000002-*"))

    def load() -> None:
        saved = CheckpointReader(path).state()
        for name in saved.model:
            saved.model[name].read()
            for value in saved.optimizer[name].values():
                if hasattr(value, "read"):
                    value.read()

    return {"save: training waits": stalled, "save: in the background": written, "load": seconds(load)}


# ---------------------------------------------------------------------------------------------- checkpoints
def checkpoints(count: int, folder: Path) -> Costs:
    """Measures a folder of `count` checkpoints of ten parameters."""
    state, peers = RankState.of(state_of(10)), WriterGroup.alone()
    for step in range(1, count + 1):
        write(folder, facts_at(step), state, peers)
    known = retention.Known()
    retention.committed(folder, known)
    keep = KeepSection(last=count, best=1, monitor="eval/loss", mode="min")
    return {
        "find the newest intact one": seconds(lambda: retention.newest(folder)),
        "ckpt ls": seconds(lambda: rows(CheckpointFolder(folder, None))),
        "after a save: remove old ones": seconds(lambda: retention.prune(folder, keep, known=known)),
    }


# ---------------------------------------------------------------------------------------------- rows
def metrics(count: int, folder: Path) -> Costs:
    """Measures a metrics.jsonl of `count` rows."""
    with (folder / FILE).open("w") as file:
        for step in range(1, count + 1):
            row = {"step": step, "attempt": 1, "time": 1e9 + step, "train/loss": 1 / step, "lr": 1e-3, "samples": step}
            file.write(json.dumps(row) + "\n")
    tracker = JSONLTracker()
    config = {"run": {"attempt": 2}}
    begun = seconds(lambda: tracker.start(name="x", folder=folder, config=config, resumed_at=count))
    appended = seconds(lambda: [tracker.log(count + step, {"train/loss": 1.0}) for step in range(1, 101)]) / 100
    rewound = seconds(lambda: tracker.rewind(count))
    tracker.finish(state="done", summary={})
    return {
        "read all rows": seconds(lambda: read_metrics(folder)),
        "resume: until the first row": begun,
        "append a row": appended,
        "go back 100 rows": rewound,
    }


# ---------------------------------------------------------------------------------------------- runs
def runs(count: int, folder: Path) -> Costs:
    """Measures a folder of `count` finished runs of the digits recipe, with ten rows each."""
    first = RunFolder(folder / "run-0")
    text = bundled()["digits"].read_text()
    first.create(text=text, resolved=text, local_files={})
    first.begin_attempt(step=0, text=text, resolved=text, local_files={})
    ended = Status(
        state="done",
        exit_code=0,
        step=10,
        total_steps=10,
        samples=80,
        world_size=1,
        strategy="ddp",
        metrics={"eval/loss": 0.5},
        error=None,
    )
    first.write_status(ended)
    row = {"attempt": 1, "time": 1e9, "train/loss": 0.5, "eval/loss": 0.5}
    first.metrics.write_text("".join(json.dumps({"step": step} | row) + "\n" for step in range(1, 11)))
    for number in range(1, count):
        shutil.copytree(first.path, folder / f"run-{number}")

    def listed() -> None:
        found = [summarize(run) for run in find_runs([folder])]
        sorted_by(found, "eval/loss")
        notable(found)
        differences(found)

    return {"runs ls": seconds(listed)}


# ---------------------------------------------------------------------------------------------- ranks
@dataclass(frozen=True, kw_only=True)
class _Simulated(WriterGroup):
    """One of many simulated ranks."""

    number: int
    ranks_in_all: int

    @property
    def rank(self) -> int:
        return self.number

    @property
    def size(self) -> int:
        return self.ranks_in_all


def ranks(count: int, folder: Path) -> Costs:
    """Measures a checkpoint of 300 parameters under ddp that `count` ranks write together."""
    state = RankState.of(state_of(300))
    writers = [
        Writer(folder, facts_at(1, count), state, _Simulated(ranks=SingleRank(), number=rank, ranks_in_all=count))
        for rank in range(count)
    ]
    draft = folder / writers[0]._begin()
    each = seconds(lambda: [writer._fill(draft) for writer in writers]) / count
    published = seconds(writers[0]._publish)
    path = next(folder.glob("step-*"))
    return {
        "each rank: its part": each,
        "rank 0: publish the checkpoint": published,
        "open it": seconds(lambda: CheckpointReader(path).state()),
        "verify all parts": seconds(lambda: retention.verify(path)),
    }


# ---------------------------------------------------------------------------------------------- the table
SIZES: dict[str, tuple[Callable[[int, Path], Costs], tuple[int, ...]]] = {
    "samples": (samples, (10**6, 10**7, 10**8, 10**9)),
    "parameters": (parameters, (10**3, 10**4, 10**5)),
    "checkpoints": (checkpoints, (10, 100, 1_000)),
    "rows": (metrics, (10**4, 10**5, 10**6)),
    "runs": (runs, (10, 100, 1_000)),
    "ranks": (ranks, (8, 64, 512, 1_024)),
}


def least(measure: Callable[[int, Path], Costs], size: int, repeats: int) -> Costs:
    """Returns the minimum of every cost over the repeats, each in an empty folder."""

    def once() -> Iterator[Costs]:
        for _ in range(repeats):
            folder = Path(tempfile.mkdtemp())
            try:
                yield measure(size, folder)
            finally:
                shutil.rmtree(folder)

    found = list(once())
    return {name: min(costs[name] for costs in found) for name in found[0]}


def spelled(cost: float) -> str:
    return f"{cost * 1e6:,.0f} µs" if cost < 1e-3 else f"{cost * 1e3:,.1f} ms" if cost < 1 else f"{cost:,.2f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    steep = []
    print("| | Size | " + "Cost | Power |\n| --- | --- | --- | --- |")
    for what in options.what:
        measure, sizes = SIZES[what]
        found = {size: least(measure, size, options.repeats) for size in sizes}
        for name in found[sizes[0]]:
            power = 0.0
            for before, size in zip((None, *sizes), sizes, strict=False):
                cost, said = found[size][name], ""
                if before is not None:
                    power = math.log(cost / found[before][name]) / math.log(size / before)
                    said = f"{power:.2f}"
                print(f"| {name} | {size:,} {what} | {spelled(cost)} | {said} |", flush=True)
            if power > MOST:
                steep.append(name)
    if steep:
        sys.exit(f"steeper than linear: {', '.join(steep)}")


if __name__ == "__main__":
    main()
