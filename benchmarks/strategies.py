"""What sharding costs in time and saves in memory: ddpforge's fsdp and deepspeed, beside loops written by hand.

    python benchmarks/strategies.py               seconds per optimizer step ÷ those of the same loop by hand
    python benchmarks/strategies.py --memory      bytes that a rank holds, beside what theory says
    python benchmarks/strategies.py --rows fsdp zero3 --nproc 1 --width 512 --steps 40

Both run on CPU ranks over gloo, in fp32, on the GPT of `ddpforge.builtin` and the bytes of Python's standard library.

Time: the two sides take turns (A B A B …) in fresh processes, and the ratio is that of their medians. Beside it stand
the smallest and the largest ratio of a pair, which say how far it can be trusted, and the ratio of rank 0's CPU time,
which other programs on the machine disturb less; waiting for other ranks is not in it. By hand means `fully_shard` on
every block and on the model, or `deepspeed.initialize` and its engine; either with torch's AdamW, clipping at 1, steps
of two micro-batches, DistributedSampler, DataLoader and `loss.item()` printed every 10 steps. ddpforge runs a recipe as
any user would, with metrics.jsonl and the console tracker on.

On both sides freed memory stays with the process, by two settings of glibc.

Memory: what a rank holds is added up from the storages of the tensors themselves, during a run of ddpforge. Weights,
optimizer state and DeepSpeed's master weights are those after the update of the last step; gradients are the most that
lay between two backward passes of that step, or between the last one and the update. The script exits with 1 when
anything is more than 5 % off. Not in that sum, but in the peak RSS beside it: activations, weights while they are
gathered, and buffers for communication. DeepSpeed's are as large as this model unless --bucket makes them smaller: by
default they hold 5e8 elements, and ZeRO-3 leaves up to 1e9 gathered.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from ddpforge.interfaces import Callback, StepInfo, Strategy

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

MICRO_BATCHES = 2  # per step
WATCHED = 3  # the step of a run whose memory is counted; by then lazily made buffers exist
LR = 1e-3
TIME = {"micro_batch": 4, "length": 128, "layers": 4, "heads": 4, "width": 192}
MEMORY = {"micro_batch": 1, "length": 64, "layers": 16, "heads": 5, "width": 320}
# How far memory may be from theory. ZeRO-2 keeps whole the one gradient that lies across the border of two ranks'
# parts, ZeRO-3 the small parameters (1e5 elements and less).
OFF = 0.05
BUCKETS = (
    "reduce_bucket_size",
    "allgather_bucket_size",
    "stage3_prefetch_bucket_size",
    "stage3_max_live_parameters",
    "stage3_max_reuse_distance",
)

RECIPE = """
recipe = 1
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
use = "language_modelling"
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
{strategy}
{callbacks}
"""
STOPWATCH = '[callbacks.stopwatch]\nuse = "./strategies.py:Stopwatch"\nwarm_up = {warm_up}\n'


# glibc gives large tensors back to the system as soon as they are freed and has every page of the next one cleared: on
# either side several per cent of the time, and how many hangs on which sizes happen to be free.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**33)}


class Held(NamedTuple):
    """Bytes per parameter."""

    weights: float
    gradients: float
    optimizer: float
    master: float


class Row(NamedTuple):
    """One line of a table: a strategy, and what it holds in theory of the 4 + 4 + 8 bytes (and a master copy)."""

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
TIMED = ("fsdp", "zero1", "zero2", "zero3")


# ---------------------------------------------------------------------------------------------- by hand
Report = Callable[[int, "Tensor"], None]


def by_hand(row: Row, options: argparse.Namespace) -> None:
    """One rank of a hand-written loop."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model, data, steps = make_model(options), micro_batches(options), range(1, options.warm_up + options.steps + 1)
    began = clocks()

    def report(step: int, loss: Tensor) -> None:
        nonlocal began
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.4f}")
        if step == options.warm_up:
            began = clocks()

    if row.strategy == "fsdp":
        fsdp_by_hand(model, data, steps, report)
    else:
        deepspeed_by_hand(model, data, steps, report, options.micro_batch, row.stage)
    write_result([(now - then) / options.steps for now, then in zip(clocks(), began, strict=True)])
    dist.destroy_process_group()
    os._exit(0)  # now and then the interpreter aborts in the threads that DeepSpeed leaves behind


def fsdp_by_hand(model: nn.Module, data: Iterator[list[Tensor]], steps: range, report: Report) -> None:
    """FSDP2 as its tutorial has it."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.functional import cross_entropy
    from torch.nn.utils import clip_grad_norm_
    from torch.optim import AdamW

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = AdamW(model.parameters(), lr=LR, fused=True)

    for step in steps:
        for _ in range(MICRO_BATCHES):
            inputs, targets = next(data)
            loss = cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
            (loss / MICRO_BATCHES).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        report(step, loss)


def deepspeed_by_hand(
    model: nn.Module, data: Iterator[list[Tensor]], steps: range, report: Report, micro_batch: int, stage: int
) -> None:
    """ZeRO as DeepSpeed's tutorial has it, with torch's optimizer."""
    import deepspeed
    from torch.nn.functional import cross_entropy
    from torch.optim import AdamW

    config = {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = AdamW(model.parameters(), lr=LR, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    for step in steps:
        for _ in range(MICRO_BATCHES):
            inputs, targets = next(data)
            loss = cross_entropy(engine(inputs).flatten(0, -2), targets.flatten())
            engine.backward(loss)
            engine.step()
        report(step, loss)


def make_model(options: argparse.Namespace) -> nn.Module:
    from ddpforge.builtin.models.gpt import GPT

    sizes = {"block_size": options.length, **{key: getattr(options, key) for key in ("layers", "heads", "width")}}
    return GPT(vocab_size=256, **sizes)


def micro_batches(options: argparse.Namespace) -> Iterator[list[Tensor]]:
    """This rank's, without end."""
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    from ddpforge.builtin.datasets.text import Text

    text = Text(split="train", block_size=options.length)
    dataset = TensorDataset(*text.__getitems__(list(range(min(20_000, len(text))))))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=options.micro_batch, sampler=sampler)
    for epoch in count():
        sampler.set_epoch(epoch)
        yield from loader


# ---------------------------------------------------------------------------------------------- inside ddpforge
class Stopwatch(Callback):
    """Times the steps after the warm-up."""

    def __init__(self, *, warm_up: int) -> None:
        self.warm_up = warm_up

    def on_step(self, info: StepInfo) -> None:
        if info.step == self.warm_up:
            self.began = clocks()
        self.steps, self.now = info.step - self.warm_up, clocks()

    def on_end(self, error: BaseException | None) -> None:
        write_result([(now - then) / self.steps for now, then in zip(self.now, self.began, strict=True)])


class Watched(Strategy):
    """Counts what this rank holds; put before the class of a strategy, whose methods it wraps."""

    def building(self) -> AbstractContextManager[Any]:
        self.before = psutil.Process().memory_info().rss
        return super().building()

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        self.steps, self.most = 0, 0
        self.parts = super().prepare(model, optimizer)
        return self.parts

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        self.most = max(self.most, held_by(gradients(self.parts[0])))

    def step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        norm = super().step(model, optimizer)
        self.steps += 1
        if self.steps == WATCHED:
            held = Held(held_by(weights(model)), self.most, held_by(state(model, optimizer)), held_by(master(model)))
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB
            write_result({"held": held, "peak": peak, "before": self.before})
        self.most = 0
        return norm


def watched(*, row: str, bucket: int = 0) -> Strategy:
    """The strategy of a row, watched; recipes name this function."""
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
    """Bytes of the storages behind these tensors, each counted once and whole, however little of it a tensor shows."""
    from torch.distributed.tensor import DTensor

    storages = [(t.to_local() if isinstance(t, DTensor) else t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def weights(model: nn.Module) -> Iterator[Tensor]:
    """Parameters: whole, FSDP's shards, ZeRO-1's and 2's views of one flat tensor; and what else is there of them."""
    for parameter in model.parameters():
        yield parameter  # under ZeRO-3: what is gathered of it at the moment, which is all of it where it is small
        if hasattr(parameter, "ds_tensor"):
            yield parameter.ds_tensor  # ZeRO-3's shard
    for unit in fsdp_units(model):
        for parameter in unit.fsdp_params:
            yield from parameter.all_gather_outputs  # empty while the unit is sharded


def gradients(model: nn.Module) -> Iterator[Tensor]:
    """Gradients, reduced or still to be reduced."""
    yield from (parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    for unit in fsdp_units(model):
        if unit._partial_reduce_output is not None:
            yield unit._partial_reduce_output  # HSDP: reduced over the shards, not yet over the replicas
    zero = getattr(model, "optimizer", None)
    if hasattr(zero, "grad_partitions_flat_buffer"):
        yield zero.grad_partitions_flat_buffer  # ZeRO-3's shards
    elif zero:
        # ZeRO-1 and 2. What is not reduced yet is in .grad; what is lies in one tensor, and these are views of it.
        for tensors in (*zero.all_grad_tensors.values(), *zero.averaged_gradients.values()):
            yield from tensors or ()


def fsdp_units(model: nn.Module) -> Iterator[Any]:
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            yield from module._get_fsdp_state()._fsdp_param_groups


def state(model: nn.Module, optimizer: Optimizer) -> Iterator[Tensor]:
    """AdamW's two moments, and its step counts of 4 bytes."""
    for entry in optimizer.state.values():
        yield from (value for value in entry.values() if hasattr(value, "untyped_storage"))


def master(model: nn.Module) -> Iterator[Tensor]:
    """DeepSpeed's own copy of the weights that this rank updates, which it keeps in fp32 too."""
    zero = getattr(model, "optimizer", None)
    for name in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # ZeRO-1 and 2; ZeRO-3
        yield from getattr(zero, name, ())


# ---------------------------------------------------------------------------------------------- running
def clocks() -> tuple[float, float]:
    """Wall time, and the CPU time of this process."""
    return time.perf_counter(), time.process_time()


def write_result(result: Any) -> None:
    """Leaves this rank's result where `start` looks for it."""
    Path(os.environ["BENCH_RESULTS"], os.environ["RANK"]).write_text(json.dumps(result))


def start(command: list[str], nproc: int, folder: Path, **variables: str) -> list[Any]:
    """Runs a program on fresh ranks; returns what each of them wrote."""
    results = folder / "results"
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir()
    threads = max(1, (os.cpu_count() or 1) // nproc)
    environment = os.environ | {
        "BENCH_RESULTS": str(results),
        "OMP_NUM_THREADS": str(threads),
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_CPU": "true",
        **variables,
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    done = subprocess.run(
        [*torchrun, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [json.loads(file.read_text()) for file in sorted(results.iterdir())]


def ddpforge(
    options: argparse.Namespace, nproc: int, folder: Path, variables: dict[str, str], **parts: Any
) -> list[Any]:
    """Runs a recipe; the last run's checkpoints go first."""
    shutil.rmtree(folder / "runs", ignore_errors=True)
    batch = nproc * MICRO_BATCHES * options.micro_batch
    (folder / "bench.toml").write_text(RECIPE.format(**vars(options) | parts, batch=batch, lr=LR))
    shutil.copy(__file__, folder / "strategies.py")
    return start(["-m", "ddpforge", "run", "bench.toml"], nproc, folder, **variables)


def seconds(side: str, name: str, nproc: int, options: argparse.Namespace, folder: Path) -> list[float]:
    """Wall and CPU seconds per step of one side, of rank 0 in fresh processes."""
    if side == "by hand":
        # In the environment, because torchrun takes some of these options for its own.
        told = {"BENCH_OPTIONS": json.dumps(vars(options)), **KEEP_MEMORY}
        return list(start([str(Path(__file__).resolve()), "--by-hand", name], nproc, folder, **told)[0])
    row = ROWS[name]
    strategy = f'use = "{row.strategy}"' + (f"\nstage = {row.stage}" if row.stage else "")
    callbacks = STOPWATCH.format(warm_up=options.warm_up)
    steps = options.warm_up + options.steps
    return list(ddpforge(options, nproc, folder, KEEP_MEMORY, strategy=strategy, callbacks=callbacks, steps=steps)[0])


def time_table(options: argparse.Namespace, folder: Path) -> None:
    print(f"{'':6} {'ranks':>5} {'by hand, ms/step':>17} {'ddpforge, ms/step':>18} ", end="")
    print(f"{'ratio':>6} {'of pairs':>12} {'of CPU time':>12}")
    for name in options.rows or TIMED:
        for nproc in options.nproc:
            pairs = [
                [seconds(side, name, nproc, options, folder) for side in ("by hand", "ddpforge")]
                for _ in range(options.repeats)
            ]
            (hand, ours), (hand_cpu, ours_cpu) = (
                [statistics.median(pair[side][clock] for pair in pairs) for side in (0, 1)] for clock in (0, 1)
            )
            ratios = sorted(ours[0] / hand[0] for hand, ours in pairs)
            spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
            print(f"{name:6} {nproc:5} {hand * 1e3:17.1f} {ours * 1e3:18.1f} ", end="")
            print(f"{ours / hand:6.3f} {spread:>12} {ours_cpu / hand_cpu:12.3f}", flush=True)


def memory_table(options: argparse.Namespace, folder: Path) -> bool:
    """True when everything is where theory says."""
    parameters = sum(parameter.numel() for parameter in make_model(options).parameters())
    print(f"{parameters:,} parameters; MiB on the fullest rank, beside the bytes per parameter of theory\n")
    titles = [f"{name:>14}" for name in (*Held._fields, "together")]
    print(f"{'':6} {'ranks':>5}", *titles, f"{'off':>7} {'peak RSS':>9} {'before model':>13}")

    # Otherwise glibc keeps freed tensors of up to 32 MiB for itself, and peak RSS measures its habits.
    unmap = {"MALLOC_MMAP_THRESHOLD_": str(2**18)}
    fine = True
    for name in options.rows or ROWS:
        row = ROWS[name]
        use = f'use = "./strategies.py:watched"\nrow = "{name}"\nbucket = {options.bucket}'
        ranks = ddpforge(options, row.nproc, folder, unmap, strategy=use, callbacks="", steps=WATCHED)
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
    parser.add_argument("--memory", action="store_true", help="count bytes instead of seconds")
    parser.add_argument(
        "--rows", nargs="+", choices=list(ROWS), help=f"default: {' '.join(TIMED)}, or all for --memory"
    )
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs per row")
    parser.add_argument("--nproc", nargs="+", type=int, default=[2], help="ranks, of the table of seconds")
    parser.add_argument("--steps", type=int, default=40, help="timed steps of a run")
    parser.add_argument("--warm-up", type=int, default=5, help="steps before them")
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--length", type=int, help="tokens of a sample")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--heads", type=int)
    parser.add_argument("--width", type=int)
    parser.add_argument("--bucket", type=int, default=0, help="elements in DeepSpeed's buckets, of the table of bytes")
    parser.add_argument("--by-hand", choices=list(ROWS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.by_hand:
        by_hand(ROWS[options.by_hand], argparse.Namespace(**json.loads(os.environ["BENCH_OPTIONS"])))
        return

    sizes = MEMORY if options.memory else TIME
    vars(options).update({name: size for name, size in sizes.items() if getattr(options, name) is None})
    with tempfile.TemporaryDirectory() as folder:
        if options.memory:
            sys.exit(not memory_table(options, Path(folder)))
        time_table(options, Path(folder))


if __name__ == "__main__":
    main()
