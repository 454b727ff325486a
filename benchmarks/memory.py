"""Bytes that a rank holds under each strategy, compared with theory.

    python benchmarks/memory.py
    python benchmarks/memory.py --rows fsdp zero3 --width 512

On CPU ranks over gloo, in fp32, with the GPT of `ddpforge.builtin` and the bytes of Python's standard library, in steps
of two micro-batches. The script adds up the storages of the tensors during a run of ddpforge. Weights, optimizer state
and DeepSpeed's master weights are counted after the update of the last step; gradients are the maximum after the
backward passes of that step. The script exits with 1 if a number differs from theory by more than 5 %. The sum does not
contain activations, gathered weights and communication buffers; the column of the peak RSS does. DeepSpeed's buffers
are as large as this model unless --bucket makes them smaller: the gradient bucket has up to 5e8 elements, and ZeRO-3
keeps up to 1e9 elements gathered.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ddpforge.builtin.models.gpt import GPT
from ddpforge.interfaces import Replica, Strategy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

MICRO_BATCHES = 2  # per step
WATCHED = 3  # the step whose memory is counted; by then all lazily allocated buffers exist
LR = 1e-3
# Allowed relative difference from theory. ZeRO-2 keeps one whole gradient, that on the border of two ranks' shards.
# ZeRO-3 keeps small parameters (up to 1e5 elements) whole.
OFF = 0.05
BUCKETS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)

RECIPE = """
recipe = 2
name = "bench"
[model]
use = "gpt"
vocab_size = 256
block_size = {length}
layers = {layers}
heads = {heads}
width = {width}
[data.train]
use = "text"
split = "train"
block_size = {length}
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = {lr}
[train]
length = "{steps}st"
global_batch = {batch}
micro_batch = {micro_batch}
clip_norm = 1.0
[checkpoint]
every = "1000000st"
[strategy]
use = "./memory.py:watched"
row = "{row}"
bucket = {bucket}
"""


class Held(NamedTuple):
    """Bytes per parameter."""

    weights: float
    gradients: float
    optimizer: float
    master: float


class Row(NamedTuple):
    """Line of the table: a strategy, and its theoretical share of the 4 + 4 + 8 bytes (and of a master copy)."""

    strategy: str
    theory: Held
    nproc: int = 2
    stage: int = 0


ROWS = {
    "ddp": Row("ddp", Held(4, 4, 8, 0)),
    "fsdp": Row("fsdp", Held(2, 2, 4, 0)),
    "hsdp": Row("fsdp", Held(2, 2, 4, 0), nproc=4),
    "zero1": Row("deepspeed", Held(4, 4, 4, 2), stage=1),
    "zero2": Row("deepspeed", Held(4, 2, 4, 2), stage=2),
    "zero3": Row("deepspeed", Held(2, 2, 4, 2), stage=3),
}


# ---------------------------------------------------------------------------------------------- inside ddpforge
class Watched(Strategy):
    """Mixin of a strategy class that counts the memory of this rank; it wraps the strategy's methods."""

    def init_context(self) -> AbstractContextManager[Any]:
        self.before = psutil.Process().memory_info().rss
        return super().init_context()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        replica = super().prepare(model, optimizer)
        backward, step = replica.backward, replica.step
        steps, most = count(1), 0

        def watched_backward(loss: Tensor) -> None:
            nonlocal most
            backward(loss)
            most = max(most, held_by(gradients(replica.module)))

        def watched_step() -> Tensor:
            nonlocal most
            norm = step()
            if next(steps) == WATCHED:
                held = Held(
                    held_by(weights(replica.module)),
                    most,
                    held_by(state(optimizer)),
                    held_by(master(replica.module)),
                )
                peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
                file = Path(os.environ["BENCH_RESULTS"], os.environ["RANK"])
                file.write_text(json.dumps({"held": held, "peak": peak, "before": self.before}))
            most = 0
            return norm

        replica.backward, replica.step = watched_backward, watched_step  # type: ignore[method-assign]
        return replica


def watched(*, row: str, bucket: int = 0) -> Strategy:
    """Builds the strategy of a row with memory counting; recipes name this function."""
    options: dict[str, Any] = {}
    if row == "ddp":
        from ddpforge.strategies.ddp import DDP as Base
    elif row in ("fsdp", "hsdp"):
        from ddpforge.strategies.fsdp import FSDP as Base

        options["replicas"] = ROWS[row].nproc // 2
    else:
        from ddpforge.strategies.deepspeed import DeepSpeed as Base

        options["stage"] = ROWS[row].stage
        if bucket:
            options["extra"] = {"zero_optimization": dict.fromkeys(BUCKETS, bucket)}

    class Strategy(Watched, Base):
        pass

    return Strategy(**options)


# ---------------------------------------------------------------------------------------------- counting
def held_by(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes of the tensors' storages. Each storage counts once and whole, also if a tensor is a view."""
    from torch.distributed.tensor import DTensor

    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Yields parameters (whole, FSDP's shards, or ZeRO-1's and 2's views of a flat tensor), and copies of them."""
    for parameter in model.parameters():
        yield parameter  # under ZeRO-3: the gathered elements; all of them for a small parameter
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor  # ZeRO-3's shard
    for unit in fsdp_units(model):
        for parameter in unit.fsdp_params:
            yield from parameter.all_gather_outputs  # empty while the unit is sharded


def gradients(model: nn.Module) -> Iterator[Tensor]:
    """Yields the gradients, reduced or not."""
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    for unit in fsdp_units(model):
        if unit._partial_reduce_output is not None:
            yield unit._partial_reduce_output  # HSDP: reduced over the shards, not yet over the replicas
    zero = getattr(model, "optimizer", None)
    if hasattr(zero, "grad_partitions_flat_buffer"):
        yield zero.grad_partitions_flat_buffer  # ZeRO-3's shards
    elif zero:
        # ZeRO-1 and 2: gradients before the reduction are in .grad; these are views of the tensor of reduced ones.
        for tensors in (*zero.all_grad_tensors.values(), *zero.averaged_gradients.values()):
            yield from tensors or ()


def fsdp_units(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def state(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yields AdamW's two moments, and its step counts of 4 bytes."""
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if hasattr(value, "untyped_storage"))


def master(model: nn.Module) -> Iterator[Tensor]:
    """Yields DeepSpeed's fp32 copy of the weights that this rank updates; it exists even if training is in fp32."""
    zero = getattr(model, "optimizer", None)
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # ZeRO-1 and 2; ZeRO-3
        yield from getattr(zero, name, ())


# ---------------------------------------------------------------------------------------------- running
def start(row: Row, name: str, options: argparse.Namespace, folder: Path) -> list[Any]:
    """Runs the recipe of a row on new ranks; returns the results of each rank."""
    results = folder / "results"
    for old in (results, folder / "runs"):
        shutil.rmtree(old, ignore_errors=True)
    results.mkdir()
    batch = row.nproc * MICRO_BATCHES * options.micro_batch
    recipe = RECIPE.format(**vars(options), row=name, batch=batch, lr=LR, steps=WATCHED)
    (folder / "bench.toml").write_text(recipe)
    shutil.copy(__file__, folder / "memory.py")
    environment = os.environ | {
        "BENCH_RESULTS": str(results),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // row.nproc)),
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_CPU": "true",
        # Otherwise glibc keeps freed tensors of up to 32 MiB, and the peak RSS would contain them.
        "MALLOC_MMAP_THRESHOLD_": str(2**18),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={row.nproc}"]
    command = [*torchrun, "-m", "ddpforge", "run", "bench.toml"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [json.loads(file.read_text()) for file in sorted(results.iterdir())]


def table(options: argparse.Namespace, folder: Path) -> bool:
    """Prints the table; returns True if all memory is as in theory."""
    sizes = {"block_size": options.length, **{key: getattr(options, key) for key in ("layers", "heads", "width")}}
    parameters = sum(parameter.numel() for parameter in GPT(vocab_size=256, **sizes).parameters())
    print(f"{parameters:,} parameters; MiB on the rank with the most memory (in theory: bytes per parameter)\n")
    titles = [f"{name:>14}" for name in (*Held._fields, "together")]
    print(f"{'':6} {'ranks':>5}", *titles, f"{'off':>7} {'peak RSS':>9} {'before model':>13}")

    fine = True
    for name in options.rows:
        row = ROWS[name]
        ranks = start(row, name, options, folder)
        held = [max(column) for column in zip(*(rank["held"] for rank in ranks), strict=True)]
        expected = [each * parameters for each in row.theory]
        off = max(abs(found - theory) / (theory or 1) for found, theory in zip(held, expected, strict=True))
        fine = fine and off <= OFF

        pairs = zip([*held, sum(held)], [*row.theory, sum(row.theory)], strict=True)
        columns = [f"{found / 2**20:9.1f} ({theory:2})" for found, theory in pairs]
        peak, before = (max(rank[key] for rank in ranks) / 2**20 for key in ("peak", "before"))
        print(f"{name:6} {row.nproc:5}", *columns, f"{off:7.1%} {peak:9.0f} {before:13.0f}", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--length", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--bucket", type=int, default=0, help="elements in DeepSpeed's buckets; 0: its own sizes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(not table(options, Path(folder)))


if __name__ == "__main__":
    main()
