"""Speed and memory of ddpforge on CUDA devices, compared with a loop by hand; writes a report.

    make test-gpu                                    tests that need a GPU, then this script on one
    make test-gpu WHEELS=build/gpu/wheels            the same without network; `make gpu-wheels` fills the folder
    make test-gpus                                   tests that need several, then this script on all of them
    python benchmarks/gpu.py --tests build/gpu/gpu.xml           on one GPU; the report includes test results
    python benchmarks/gpu.py --only mlp,resnet50     some of the measurements
    python benchmarks/gpu.py --minutes 9             begins nothing that would end later; call it again to go on
    python benchmarks/gpu.py --ranks 8               on 8 GPUs; 0: on all GPUs
    python benchmarks/gpu.py --tiny [--ranks 2]      on CPUs, with tiny models: checks only that the script runs

ddpforge and the loop by hand train alternately in their own processes, with the same model, samples, batch, precision,
fused AdamW and clipping. If the model is compiled, both compile the loss with it. ddpforge runs a recipe, with
metrics.jsonl, console and all checks on. Each process times three windows of steps after a warm-up, each between two
synchronizations of the device. Ratios are of the medians of all windows; the spread is that of the slower side's
windows, (largest - smallest) / median. The limits are ratios, which are valid on any machine, and alarms, which are for
an H100 or H200. The measurements run in the order of their value. After each, build/gpu/report.md and report.json (with
--ranks report-N) are written; with --minutes, a later call reads report.json and goes on. The exit code is 1
if a limit is missed, if anything fails, or if something is left.
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
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ddpforge.interfaces import Callback, StepInfo

LR, LOG_EVERY = 1e-3, 10
GPT = 'use = "gpt"\nvocab_size = {}\nblock_size = {}\nlayers = {}\nheads = {}\nwidth = {}'
RECIPE = """
recipe = 2
name = "gpu"
[model]
{model}
[data.train]
use = "gpu:Samples"
case = {case}
[task]
use = "{task}"
[optimizer]
use = "adamw"
lr = {lr}
[train]
{train}
length = "{steps}st"
global_batch = {batch}
micro_batch = {micro_batch}
precision = "{precision}"
compile = "{compile}"
fp8 = "{fp8}"
channels_last = {channels_last}
clip_norm = 1.0
[track]
every = "{log_every}st"
memory_check = "off"
[checkpoint]
every = "{save_every}st"
[strategy]
{strategy}
[callbacks.clock]
use = "gpu:Clock"
case = {case}
"""


@dataclass(frozen=True)
class Case:
    """Model and training settings. `batch`: samples per forward pass on one rank; a step makes `passes` passes."""

    model: str  # the table [model] of a recipe
    batch: int
    passes: int = 1
    precision: str = "bf16"
    compile: str = "off"  # as train.compile
    fp8: str = "off"  # as train.fp8
    channels_last: bool = False
    train: str = ""  # further lines of [train]
    strategy: str = "ddp"  # "fsdp:fp32" all-gathers weights in fp32
    image: int = 224  # height and width in pixels
    warm: int = 20
    steps: int = 30  # of each of three windows
    save_every: int = 0  # steps; if set, each step is timed
    profiled: bool = False  # measures how busy the GPU is
    turns: int = 1  # processes of each side

    @property
    def sizes(self) -> dict[str, Any]:
        import tomllib

        return tomllib.loads(self.model)

    @property
    def last(self) -> int:
        return self.warm + WINDOWS * self.steps


_until: float | None = None  # when this call ends, by time.monotonic
WINDOWS = 3
SHORTEST = 20.0  # seconds: no measurement takes less
LLAMA = """
use = "causal_lm"
model_type = "llama"
lora = {{ targets = "all-linear", r = 16 }}
options.vocab_size = {}
options.hidden_size = {}
options.intermediate_size = {}
options.num_hidden_layers = {}
options.num_attention_heads = {}
options.num_key_value_heads = {}
options.max_position_embeddings = {}
"""
WORKSPACE = 32 * 2**20  # bytes that torch allocates for cuBLAS on an H100, which no plan counts
GPT_124M, GPT_350M = GPT.format(50304, 1024, 12, 12, 768), GPT.format(50304, 1024, 24, 16, 1024)
GPT_1B = GPT.format(50304, 2048, 24, 16, 2048)
RESNET = 'use = "torchvision"\narch = "{}"\nclasses = 1000'
LARGE = {
    "mlp": Case('use = "mlp"\ninputs = 64\nhidden = [64]\noutputs = 10', 64, precision="fp32", steps=500, turns=2),
    "resnet18-small": Case(RESNET.format("resnet18"), 64, channels_last=True, image=32, steps=100),
    "gpt-124m": Case(GPT_124M, 16, compile="default"),
    "gpt-124m-eager": Case(GPT_124M, 16),
    "gpt-124m-fsdp": Case(GPT_124M, 16, strategy="fsdp"),
    "gpt-4m-cuda-graphs": Case(GPT.format(4096, 256, 6, 4, 256), 8, compile="reduce-overhead", steps=200),
    "gpt-350m": Case(GPT_350M, 8, compile="default", steps=20),
    "gpt-1.3b": Case(GPT_1B, 4, strategy="fsdp", steps=15),
    "gpt-1.3b-fp8": Case(GPT_1B, 4, compile="default", fp8="tensorwise", steps=10),
    "lora-8b": Case(
        LLAMA.format(128256, 4096, 14336, 32, 32, 8, 2048), 4, train='frozen_dtype = "bf16"', warm=5, steps=5
    ),
    "resnet50": Case(RESNET.format("resnet50"), 256, channels_last=True, steps=20),
}
_SMALL = {
    "gpt": GPT.format(64, 16, 2, 2, 16),
    "resnet50": RESNET.format("resnet18"),
    "lora": LLAMA.format(64, 16, 32, 2, 2, 1, 16),
}
_TINY = {"batch": 8, "warm": 2, "steps": 3, "compile": "off", "fp8": "off", "image": 32, "turns": 1}
TINY = {
    name: replace(case, model=_SMALL.get(name.partition("-")[0], case.model), **_TINY) for name, case in LARGE.items()
}


class Found(NamedTuple):
    """Measurements of one side."""

    windows: list[float]  # seconds per step, of each window
    memory: int  # peak bytes of torch's allocator
    longest: float  # seconds of the longest step, if each was timed
    busy: float  # fraction of the time in which the GPU was busy, if profiled
    loss: float  # after LOG_EVERY steps: later, models that learn random samples by heart differ widely

    @property
    def seconds(self) -> float:
        return statistics.median(self.windows)


class OutOfTime(Exception):
    """The time of this call ended within a measurement."""


class Failed(Exception):
    """A side failed, or the two sides did different work."""


class Row(NamedTuple):
    """Line of the report: a limit, and the measured value."""

    name: str
    expected: str
    found: str
    well: bool | None  # None for an alarm of another device


# ---------------------------------------------------------------------------------------------- shared by both sides
def device() -> torch.device:
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Samples:
    """Random samples in memory, fetched one batch at a time."""

    random = False

    def __init__(self, *, case: dict[str, Any]) -> None:
        self.named = Case(**case).sizes["use"] == "causal_lm"
        image, number, maker = case["image"], 4096, torch.Generator().manual_seed(0)
        sizes = Case(**case).sizes
        if sizes["use"] == "gpt":
            text = torch.randint(sizes["vocab_size"], (number, sizes["block_size"] + 1), generator=maker)
            self.inputs, self.targets = text[:, :-1], text[:, 1:]
        elif sizes["use"] == "causal_lm":
            options = sizes["options"]
            shape = (number, options["max_position_embeddings"])
            self.inputs = self.targets = torch.randint(options["vocab_size"], shape, generator=maker)
        elif sizes["use"] == "mlp":
            self.inputs = torch.randn(number, 64, generator=maker)
            self.targets = torch.randint(10, (number,), generator=maker)
        else:
            self.inputs = torch.randn(1024, 3, image, image, generator=maker)
            self.targets = torch.randint(1000, (1024,), generator=maker)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        if self.inputs.ndim == 4:  # neighbouring images: to gather random ones takes as long as a step
            first = indices[0] % (len(self) - len(indices) + 1)
            return self.inputs[first : first + len(indices)], self.targets[first : first + len(indices)]
        rows = torch.tensor(indices)
        return self.inputs[rows], self.targets[rows]

    def collate(self, batch: tuple[Tensor, Tensor]) -> Any:
        return dict(zip(("input_ids", "labels"), batch, strict=True)) if self.named else batch


class Clock(Callback):
    """Times the steps after the warm-up, and writes the result."""

    def __init__(self, *, case: dict[str, Any]) -> None:
        self.case = Case(**case)
        self.each: list[float] = []
        self.windows: list[float] = []
        self.loss = float("nan")

    def on_step(self, info: StepInfo) -> None:
        if info.step == LOG_EVERY:
            self.loss = info.metrics["train/loss"]
        self.tick(info.step)

    def tick(self, step: int) -> None:
        """Records the end of a step."""
        if step == self.case.warm:
            synchronize()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()
            self.profiler = torch.profiler.profile() if self.case.profiled else None
            if self.profiler:
                self.profiler.start()
            self.began = self.before = time.perf_counter()
            return
        if step > self.case.warm and self.case.save_every:
            synchronize()
            now = time.perf_counter()
            self.each.append(now - self.before)
            self.before = now
        if step > self.case.warm and (step - self.case.warm) % self.case.steps == 0:
            synchronize()
            now = time.perf_counter()
            self.windows.append((now - self.began) / self.case.steps)
            self.began = now
        if step == self.case.last:
            memory = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
            busy = busy_in(self.profiler) if self.profiler else 0.0
            tell(Found(self.windows, memory, max(self.each, default=0.0), busy, self.loss))


def busy_in(profiler: Any) -> float:
    """Returns the fraction of the time, from the first operation to the last, in which the GPU was busy."""
    profiler.stop()
    there = [event.time_range for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    busy, until = 0.0, 0.0
    for span in sorted(there, key=lambda span: span.start):
        busy += max(0.0, span.end - max(span.start, until))
        until = max(until, span.end)
    return busy / (until - min(span.start for span in there)) if there else 0.0


def tell(found: Any) -> None:
    """Writes the result of rank 0 to the file that the parent process reads."""
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ["GPU_RESULT"]).write_text(json.dumps(found))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, -2), targets.flatten())


# ---------------------------------------------------------------------------------------------- the sides
def by_hand(case: Case, ranks: int) -> None:
    """Trains like torch's tutorials of DDP, FSDP2, autocast and torch.compile."""
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, DistributedSampler

    place = device()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    sharded, low = case.strategy.startswith("fsdp"), case.precision == "bf16"
    if ranks > 1 or sharded:
        dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    torch.manual_seed(0)
    model = built(case).to(place)
    if case.channels_last:
        model = model.to(memory_format=torch.channels_last)
    wrapped: Any = model
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32)
        for block in model.blocks:  # type: ignore[union-attr]
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    elif ranks > 1:
        wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if case.fp8 != "off":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(case.fp8)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name != "head")

    def forward(inputs: Tensor, targets: Tensor) -> Tensor:
        return criterion(wrapped(inputs), targets)

    criterion = loss_of
    if case.compile != "off" and ranks == 1:
        forward = torch.compile(forward, mode=case.compile)
    elif case.compile != "off":  # DDP splits the graph of its module alone
        wrapped, criterion = torch.compile(wrapped, mode=case.compile), torch.compile(criterion)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    data: Any = Samples(case=vars(case))
    sampler = DistributedSampler(data) if ranks > 1 else None
    reads: Any = {"sampler": sampler, "shuffle": sampler is None, "collate_fn": data.collate, "drop_last": True}
    loader = DataLoader(data, case.batch, pin_memory=place.type == "cuda", **reads)
    batches, clock = endless(loader), Clock(case=vars(case))
    for step in range(1, case.last + 1):
        optimizer.zero_grad()
        for number in range(case.passes):
            inputs, targets = (one.to(place, non_blocking=True) for one in next(batches))
            if case.channels_last:
                inputs = inputs.to(memory_format=torch.channels_last)
            holds = ranks > 1 and not sharded and number < case.passes - 1
            with wrapped.no_sync() if holds else nullcontext():
                with torch.autocast(place.type, torch.bfloat16, enabled=low):
                    loss = forward(inputs, targets) / case.passes
                loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % LOG_EVERY == 0:
            now = loss.item() * case.passes
            clock.loss = now if step == LOG_EVERY else clock.loss
        clock.tick(step)
    if dist.is_initialized():
        dist.destroy_process_group()


def endless(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def built(case: Case) -> Any:
    """Builds the model of a recipe with its constructor."""
    from ddpforge.builtin.models.gpt import GPT as Gpt
    from ddpforge.builtin.models.mlp import MLP
    from ddpforge.builtin.models.vision import torchvision_model

    options = case.sizes
    makers: dict[str, Any] = {"gpt": Gpt, "mlp": MLP, "torchvision": torchvision_model}
    return makers[options.pop("use")](**options)


def by_ddpforge(case: Case, ranks: int) -> None:
    """Trains with a recipe, with all defaults on."""
    import ddpforge

    ddpforge.run(written(case, ranks), out=Path(os.environ["GPU_RESULT"] + "-runs"))


def planned(case: Case, ranks: int) -> None:
    """Predicts the peak memory of a step with `ddpforge plan`, in bytes."""
    command = [sys.executable, "-m", "ddpforge", "plan", str(written(case, ranks)), "--device", "h100", "--json"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    tell({"peak": json.loads(found.stdout)[0]["peak"]})


def written(case: Case, ranks: int) -> Path:
    """Writes the recipe of a case and returns its file."""
    fields = json.dumps(vars(case)).replace('": ', '" = ')  # an inline table
    recipe = Path(os.environ["GPU_RESULT"] + f"-{os.environ.get('RANK', '0')}.toml")
    use, _, option = case.strategy.partition(":")
    text = RECIPE.format(
        case=fields,
        model=case.model,
        task={"gpt": "language_modeling", "causal_lm": "causal_lm"}.get(case.sizes["use"], "classification"),
        lr=LR,
        log_every=LOG_EVERY,
        steps=case.last,
        batch=case.batch * case.passes * ranks,
        micro_batch=case.batch,
        precision=case.precision,
        compile=case.compile,
        fp8=case.fp8,
        train=case.train,
        channels_last=str(case.channels_last).lower(),
        save_every=case.save_every or 10**6,
        strategy=f'use = "{use}"\n' + (f'all_gather_dtype = "{option}"\n' if option else ""),
    )
    recipe.write_text(text)
    return recipe


def copies(case: Case, ranks: int) -> None:
    """Measures the rate of a checkpoint's copy to the host, and the additional time of a fork after it."""
    from ddpforge.checkpoint.staging import Staging
    from ddpforge.interfaces import TensorShard

    state = torch.zeros(2**30 if torch.cuda.is_available() else 2**20, dtype=torch.uint8, device=device())
    staging, before = Staging(), fork_seconds()
    for _ in range(2):  # the first copy allocates and pins memory
        synchronize()
        began = time.perf_counter()
        staging.copy({"model": {"state": [TensorShard.whole(state)]}, "optimizer": {}, "callbacks": {}})
        staging.wait()
        took = time.perf_counter() - began
    tell({"rate": len(state) / took, "fork": fork_seconds() - before})


def fork_seconds() -> float:
    """Returns the time of a fork, the start of a loader process; the best of five."""
    took = []
    for _ in range(5):
        began = time.perf_counter()
        if (child := os.fork()) == 0:
            os._exit(0)
        os.waitpid(child, 0)
        took.append(time.perf_counter() - began)
    return min(took)


def reductions(case: Case, ranks: int) -> None:
    """Measures the bus bandwidth of an all-reduce, as in PERFORMANCE.md of https://github.com/NVIDIA/nccl-tests."""
    import torch.distributed as dist

    place = device()
    if place.type == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if place.type == "cuda" else "gloo")
    row = torch.zeros(2**28 if place.type == "cuda" else 2**18, device=place)
    for turn in range(25):
        if turn == 5:
            synchronize()
            began = time.perf_counter()
        dist.all_reduce(row)
    synchronize()
    tell({"rate": 2 * (ranks - 1) / ranks * row.nbytes * 20 / (time.perf_counter() - began)})
    dist.destroy_process_group()


SIDES = {"hand": by_hand, "ddpforge": by_ddpforge, "plan": planned, "copies": copies, "reductions": reductions}


def answer(side: str, case: Case, ranks: int) -> Any:
    """Runs one of `SIDES` in new processes and returns its result; raises Failed with the end of its output."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        command = [sys.executable]
        if ranks > 1 or case.strategy.startswith("fsdp"):
            command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        asked = json.dumps({"side": side, "case": vars(case), "ranks": ranks})
        command += [__file__, "--worker", asked]
        environment = os.environ | {"GPU_RESULT": str(result)}
        left = None if _until is None else max(1.0, _until - time.monotonic())
        try:
            done = subprocess.run(
                command, env=environment, cwd=folder, capture_output=True, text=True, check=False, timeout=left
            )
        except subprocess.TimeoutExpired as late:
            raise OutOfTime from late
        if done.returncode or not result.exists():
            raise Failed(f"{side} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[:4000]}")
        return json.loads(result.read_text())


def run(side: str, case: Case, ranks: int) -> Found:
    return Found(*answer(side, case, ranks))


def pair(case: Case, ranks: int) -> tuple[Found, Found]:
    """Runs ddpforge and the loop by hand alternately; returns each with the windows of all its runs; raises Failed."""
    turns = [(run("ddpforge", case, ranks), run("hand", case, ranks)) for _ in range(case.turns)]
    ours, hand = (
        side[-1]._replace(windows=[seconds for found in side for seconds in found.windows])
        for side in zip(*turns, strict=True)
    )
    if not abs(ours.loss - hand.loss) <= 0.2 * max(hand.loss, 1.0):  # the order of samples differs
        raise Failed(f"the sides did not do the same work: losses {ours.loss:.4f} and {hand.loss:.4f}")
    return ours, hand


# ---------------------------------------------------------------------------------------------- limits
def most(name: str, found: float, limit: float, unit: str = "") -> Row:
    return Row(name, f"≤ {limit:g}{unit}", f"{found:.3f}{unit}", found <= limit)


def alarm(name: str, found: float, limit: float, unit: str = "") -> Row:
    """Returns a row with an absolute limit, which is judged only on an H100 or H200."""
    there = torch.cuda.is_available() and any(kind in torch.cuda.get_device_name(0) for kind in ("H100", "H200"))
    return Row(name, f"≥ {limit:g}{unit} on an H100", f"{found:.3g}{unit}", found >= limit if there else None)


def utilisation(case: Case, seconds: float) -> float:
    """Returns the model FLOPs utilization of a GPT (Chowdhery et al., "PaLM", 2022) of the device's peak in bf16.

    It counts all attention weights, though a causal kernel computes only half of them.
    """
    from ddpforge.tools.simulation.devices import DEVICES

    name = torch.cuda.get_device_name(0).lower() if torch.cuda.is_available() else ""
    peak = next((one.half for key, one in DEVICES.items() if key.partition("-")[0] in name), DEVICES["h100"].half)
    sizes = case.sizes
    weights = 12 * sizes["layers"] * sizes["width"] ** 2 + sizes["vocab_size"] * sizes["width"]
    token = 6 * weights + 12 * sizes["layers"] * sizes["width"] * sizes["block_size"]
    return float(token * case.batch * case.passes * sizes["block_size"] / seconds / peak)


Rows = Iterator[Row]


def beside(name: str, case: Case, ranks: int, limit: float) -> Rows:
    """Yields speed and memory compared with the loop by hand, and alarms."""
    ours, hand = pair(case, ranks)
    what = f"{name}, {case.strategy.partition(':')[0]}, {ranks} ranks" if ranks > 1 else name
    windows = max(ours.windows, hand.windows, key=lambda windows: max(windows) / min(windows))
    spread = (max(windows) - min(windows)) / statistics.median(windows)
    times = f"{hand.seconds * 1e3:.2f} ms, spread {spread:.1%}"
    yield most(f"{what}: step ÷ by hand ({times})", ours.seconds / hand.seconds, limit)
    if hand.memory:
        yield most(f"{what}: memory ÷ by hand ({hand.memory / 2**20:.0f} MiB)", ours.memory / hand.memory, 1.02)
    if ranks == 1:
        yield from beside_plan(what, case, ours)
    if name in ("gpt-350m", "gpt-1.3b"):
        yield alarm(f"{what}: model FLOPs utilization", utilisation(case, ours.seconds), 0.45 if ranks == 1 else 0.4)
    if name == "resnet50":
        yield alarm(f"{what}: images per second", case.batch / ours.seconds, 2900)


def beside_plan(what: str, case: Case, ours: Found) -> Rows:
    """Yields the peak that `ddpforge plan` predicts, compared with the allocator's; a compiled model has no plan."""
    if case.compile == "off" and ours.memory > 2**30:
        plan = answer("plan", case, 1)["peak"]
        off = abs(plan + WORKSPACE - ours.memory) / ours.memory
        yield most(f"{what}: `ddpforge plan` ({plan / 2**20:.0f} MiB + workspace) is off by", off, 0.02)


def float8(case: Case) -> Rows:
    """Yields the time of a step in bf16 relative to one in float8."""
    half, eighth = (run("ddpforge", replace(case, fp8=fp8), 1) for fp8 in ("off", case.fp8))
    yield alarm("gpt-1.3b: step in bf16 ÷ step in fp8", half.seconds / eighth.seconds, 1.2)


def adapted(case: Case) -> Rows:
    """Yields the tokens per second of adapters on a model with 8 billion random weights, and the plan of its memory."""
    missing = [name for name in ("ddpforge_transformers", "peft") if find_spec(name) is None]
    if missing:
        yield Row("lora-8b: tokens per second", "≥ 12000 on an H100", f"not installed: {', '.join(missing)}", None)
        return
    ours = run("ddpforge", case, 1)
    tokens = case.batch * case.sizes["options"]["max_position_embeddings"]
    yield alarm("lora-8b: tokens per second", tokens / ours.seconds, 12_000)
    yield from beside_plan("lora-8b", case, ours)


def busy(case: Case) -> Rows:
    """Yields the fraction of time in which the GPU is busy."""
    found = run("ddpforge", replace(case, profiled=True, steps=20), 1)
    yield alarm("gpt-350m: fraction of 20 steps in which the GPU is busy", found.busy, 0.97)


def copied() -> Rows:
    """Yields the rate of a checkpoint's copy to the host, and its effect on forks."""
    found = answer("copies", LARGE["mlp"], 1)
    yield alarm("a checkpoint's copy to the host, GB/s", found["rate"] / 1e9, 20)
    yield most("additional time of a fork after the copy, ms", found["fork"] * 1e3, 100)


def reduced(ranks: int) -> Rows:
    """Yields the bandwidth of the machine, for comparison with the other results."""
    found = answer("reductions", LARGE["mlp"], ranks)
    yield alarm(f"all-reduce of 1 GiB, {ranks} ranks, bus bandwidth, GB/s", found["rate"] / 1e9, 400)


def stall(case: Case, ranks: int) -> Rows:
    """Yields the time that a save delays training: a copy of the state to the host."""
    found = run("ddpforge", replace(case, save_every=max(2, case.steps // 4)), ranks)
    share = parameters(case) * 12 / ranks  # all ranks write the same number of bytes
    yield most("a save's stall, ms", (found.longest - found.seconds) * 1e3, round(share / 20e9 * 1e3 + 50, 1))


def growth(case: Case, ranks: int) -> Rows:
    """Yields the weak scaling of DDP: one rank and all ranks, with the same number of samples per rank."""
    for passes, limit in ((4, 0.95), (1, 0.90)):
        each = replace(case, passes=passes)
        alone, together = run("ddpforge", each, 1), run("ddpforge", each, ranks)
        found = alone.seconds / together.seconds
        name = f"gpt-124m, ddp: step of 1 rank ÷ step of {ranks}, {passes} forward passes per step"
        yield Row(name, f"≥ {limit}", f"{found:.3f}", found >= limit)


def gathered(case: Case, ranks: int) -> Rows:
    """Yields the extra memory of FSDP's all-gathers in fp32 over bf16: 2 bytes per parameter if they were not freed."""
    wide, narrow = (run("ddpforge", each, ranks) for each in (replace(case, strategy="fsdp:fp32"), case))
    more = (wide.memory - narrow.memory) / parameters(case)
    yield most("gpt-1.3b, fsdp: memory of all_gather_dtype = fp32 over compute, bytes a parameter", more, 0.5)


def parameters(case: Case) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in built(case).parameters())


def measures(cases: dict[str, Case], ranks: int) -> Iterable[tuple[str, Callable[[], Rows]]]:
    """Yields all measurements for one GPU, or for several, with their names."""
    if ranks == 1:
        limits = {"gpt-124m": 1.0, "gpt-350m": 1.02, "gpt-124m-eager": 1.02, "resnet50": 1.02}
        later = {"gpt-4m-cuda-graphs": 1.05, "mlp": 1.10, "resnet18-small": 1.05, "gpt-124m-fsdp": 1.02}
        yield from ((name, partial(beside, name, cases[name], 1, limit)) for name, limit in limits.items())
        yield "lora-8b", partial(adapted, cases["lora-8b"])
        yield from ((name, partial(beside, name, cases[name], 1, limit)) for name, limit in later.items())
        yield "fp8", partial(float8, cases["gpt-1.3b-fp8"])
        yield "busy", partial(busy, cases["gpt-350m"])
        yield "copies", copied
        yield "stall", partial(stall, cases["gpt-350m"], 1)
        return
    sharded = cases["gpt-1.3b"]
    yield "reductions", partial(reduced, ranks)
    yield "gpt-124m", partial(beside, "gpt-124m", cases["gpt-124m"], ranks, 1.02)
    yield "scaling", partial(growth, cases["gpt-124m"], ranks)
    yield "gpt-1.3b", partial(beside, "gpt-1.3b", sharded, ranks, 1.02)
    yield "gathered", partial(gathered, sharded, ranks)
    yield "stall", partial(stall, sharded, ranks)


# ---------------------------------------------------------------------------------------------- the report
class Outcome(NamedTuple):
    """Result and recorded properties of a test."""

    name: str
    outcome: str
    noted: dict[str, str]


def outcomes(file: Path) -> tuple[list[Outcome], float]:
    """Returns the tests of a JUnit file, and their total seconds."""
    found, seconds = [], 0.0
    for case in ElementTree.parse(file).iter("testcase"):
        seconds += float(case.get("time", "0"))
        told = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
        noted = {one.get("name", ""): one.get("value", "") for one in case.iter("property")}
        found.append(Outcome(f"{case.get('classname')}::{case.get('name')}", told[0] if told else "passed", noted))
    return found, seconds


def report(rows: list[Row], failures: list[str], tests: list[Outcome], facts: dict[str, Any]) -> str:
    cuda = facts["cuda"] or {}
    gpus = [one["name"] for one in cuda.get("gpus", ())]
    lines = ["# ddpforge on GPUs", "", f"- {facts['time']}, {facts['platform']}, Python {facts['python']}"]
    lines += [f"- {', '.join(f'{name} {number}' for name, number in facts['packages'].items() if number)}"]
    lines += [f"- {len(gpus)} × {gpus[0]}" if gpus else "- no GPU: the numbers mean nothing"]
    lines += [f"- {name} {cuda[name]}" for name in ("driver", "runtime", "cudnn", "nccl") if cuda.get(name)]
    lines += ["", "| | Expected | Found | |", "| --- | --- | --- | --- |"]
    words = {True: "yes", False: "**no**", None: "not judged"}
    lines += [f"| {row.name} | {row.expected} | {row.found} | {words[row.well]} |" for row in rows]
    for failure in failures:
        lines += ["", "```text", failure.strip(), "```"]
    if tests:
        passed = sum(test.outcome == "passed" for test in tests)
        lines += ["", f"{passed} of {len(tests)} tests passed.", ""]
        lines += [f"- {test.outcome}: `{test.name}`" for test in tests if test.outcome != "passed"]
        lines += [f"- `{test.name}`: {name} {value}" for test in tests for name, value in test.noted.items()]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1, help="number of GPUs; 0: all")
    parser.add_argument("--minutes", type=float, default=0, help="time of this call; default: no limit")
    parser.add_argument("--only", help="names of measurements, with commas between; default: all")
    parser.add_argument("--tests", type=Path, help="file of pytest --junitxml")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on CPUs")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder of the report")
    options = parser.parse_args()
    if options.tiny:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    there = torch.cuda.device_count()
    ranks = options.ranks or there
    if not options.tiny and not 0 < ranks <= there:
        parser.error(f"there are {there} GPUs; --tiny tries the script on CPUs")
    began = time.monotonic()
    if options.minutes:
        global _until
        _until = began + 60 * options.minutes
    tests, tested = outcomes(options.tests) if options.tests else ([], 0.0)

    from ddpforge.runs.environment import describe_environment

    facts = describe_environment()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / ("report.md" if options.ranks == 1 else f"report-{ranks}.md")
    before = file.with_suffix(".json")
    measured = json.loads(before.read_text())["measured"] if options.minutes and before.exists() else {}

    def write(further: list[Row]) -> tuple[list[Row], list[str]]:
        rows = [Row(*row) for one in measured.values() for row in one["rows"]] + further
        failures = [one["failure"] for one in measured.values() if one["failure"]]
        file.write_text(report(rows, failures, tests, facts))
        found = {"rows": [row._asdict() for row in rows], "failures": failures, "measured": measured}
        data = {**facts, **found, "tests": [test._asdict() for test in tests]}
        file.with_suffix(".json").write_text(json.dumps(data, indent=1))
        return rows, failures

    only = options.only.split(",") if options.only else None
    left = []
    for name, measure in measures(TINY if options.tiny else LARGE, ranks):
        if (only and name not in only) or name in measured:
            continue
        if _until and time.monotonic() > _until - SHORTEST:
            left.append(name)
            continue
        rows, failure = [], ""
        try:
            for row in measure():
                rows.append(row)
                print(f"{row.name}: {row.found}, expected {row.expected}", flush=True)
        except OutOfTime:
            left.append(name)
            continue
        except Failed as failed:
            failure = str(failed)
            print(failure, flush=True)
        measured[name] = {"rows": rows, "failure": failure}
        write([])
    further = []
    if ranks == 1 and options.tests:
        further = [most("tests and measurements together, minutes", (tested + time.monotonic() - began) / 60, 10)]
    if torch.cuda.is_available():
        torch.cuda.init()
        facts = describe_environment()
    rows, failures = write(further)
    print(f"\nThe report is {file}; {file.with_suffix('.json').name} in the same folder contains its data.")
    if left:
        print(f"Not measured in {options.minutes:g} minutes: {', '.join(left)}. The same command goes on with them.")
    bad = any(row.well is False for row in rows) and not options.tiny
    failing = any(test.outcome in ("failure", "error") for test in tests)
    return int(bad or bool(failures) or bool(left) or failing)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        order = json.loads(sys.argv[2])
        SIDES[order["side"]](Case(**order["case"]), order["ranks"])
    else:
        sys.exit(main())
