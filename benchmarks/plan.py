"""Compares the memory that `ddpforge plan` predicts with the memory of a run of two ranks.

    python benchmarks/plan.py                        the table of docs/guides/memory.md
    python benchmarks/plan.py --models gpt-4m        a part of it
    python benchmarks/plan.py --large                time and memory of plans for 1.3 B, 7 B and 70 B parameters
    python benchmarks/plan.py --cuda                 on GPUs: compares with torch.cuda.max_memory_allocated

Measures the peak memory of the third step, on the rank with the most memory, without the memory before the model was
built. On CPUs it needs a C compiler (`cc`): heap.c counts the allocations of torch's CPU allocator in every thread.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RANKS = 2

HEAD = """
recipe = 2
name = "memory"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "4st"
global_batch = 8
[track]
memory_check = "off"
"""
GPT = """
[model]
use = "gpt"
vocab_size = {vocabulary}
block_size = {block}
layers = {layers}
heads = {heads}
width = {width}
[data.train]
use = "text"
split = "train"
block_size = {block}
[task]
use = "language_modeling"
"""
PICTURES = """
[model]
use = "torchvision"
arch = "resnet50"
classes = 10
[data.train]
use = "./samples.py:Pictures"
[task]
use = "classification"
"""
LLAMA = """
[model]
use = "causal_lm"
model_type = "llama"
[model.options]
hidden_size = 256
intermediate_size = 688
num_hidden_layers = 4
num_attention_heads = 4
vocab_size = 4096
max_position_embeddings = 256
tie_word_embeddings = true
[data.train]
use = "./samples.py:Tokens"
[task]
use = "causal_lm"
"""
DATA = """
import torch

class Pictures(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.full((3, 224, 224), i / 64), i % 10

class Tokens(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        tokens = torch.full((256,), i)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
"""
MODELS = {
    "gpt-4m": GPT.format(vocabulary=4096, block=256, layers=4, heads=4, width=256),
    "gpt-124m": GPT.format(vocabulary=50304, block=256, layers=12, heads=12, width=768),
    "resnet50": PICTURES,
    "llama": LLAMA,
}
STRATEGIES = {
    "ddp": [],
    "fsdp": [],
    "fsdp, checkpointing": ["train.activation_checkpointing=true"],
    "fsdp:tensor=2": [],
    "pipeline": ["train.micro_batch=2"],
    "deepspeed:1": [],
    "deepspeed:2": [],
    "deepspeed:3": [],
}
OWN = {("resnet50", "fsdp:tensor=2"): ['strategy.plan={"fc"="colwise_gather_output"}']}
"""Tensor-parallel plans. A ResNet has none by default; only its last layer is split, its convolutions stay whole."""


LARGE = {
    "1.3 B": {"layers": 24, "heads": 16, "width": 2048},
    "7 B": {"layers": 34, "heads": 32, "width": 4096},
    "70 B": {"layers": 86, "heads": 64, "width": 8192},
}
PLANNED = [("ddp", 8), ("fsdp", 8), ("fsdp", 1024), ("fsdp:tensor=8", 1024)]
PLANNED += [(f"deepspeed:{stage}", 1024) for stage in (1, 2, 3)]
PLANNED += [("pipeline:stages=2", 8), ("pipeline:stages=8", 8), ("pipeline:stages=16", 1024)]


def worker() -> None:
    """Runs one rank of a measured run; writes its peak memory to a file."""
    import torch

    from ddpforge.app import build as building
    from ddpforge.cli import main
    from ddpforge.training.stepping import Stepping

    heap = None if os.environ.get("BENCH_CUDA") else ctypes.CDLL(None)
    for name in ("heap_live", "heap_peak") if heap else ():
        getattr(heap, name).restype = ctypes.c_long
    build, step, before = building._model, Stepping.take, 0

    def built(parts: Any) -> Any:
        nonlocal before
        before = heap.heap_live() if heap else 0
        return build(parts)

    def stepped(self: Any, progress: Any, **named: Any) -> Any:
        heap.heap_restart() if heap else torch.cuda.reset_peak_memory_stats()
        found = step(self, progress, **named)
        if progress.step == 3:
            peak = heap.heap_peak() if heap else torch.cuda.max_memory_allocated()
            Path(f"{os.environ['BENCH_RESULT']}{os.environ['RANK']}").write_text(str(peak - before))
        return found

    building._model, Stepping.take = built, stepped
    sys.argv = [sys.argv[0], *sys.argv[2:]]
    main()


def measured(recipe: Path, sets: list[str], *, cuda: bool) -> int:
    """Returns the peak memory in bytes of the rank with the most memory."""
    folder, result = recipe.parent, recipe.parent / "result"
    environment = os.environ | {"BENCH_RESULT": str(result)} | ({"BENCH_CUDA": "1"} if cuda else {})
    if not cuda:
        library = folder / "heap.so"
        if not library.exists():
            build = ["cc", "-O2", "-shared", "-fPIC", str(HERE / "heap.c"), "-o", str(library), "-ldl"]
            subprocess.run(build, check=True)
        environment |= {"LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
    command = [*torchrun, str(HERE / "plan.py"), "--worker", "run", str(recipe), "--fresh", *sets]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return max(int(Path(f"{result}{rank}").read_text()) for rank in range(RANKS))


def predicted(recipe: Path, strategy: str, sets: list[str]) -> int:
    command = [sys.executable, "-m", "ddpforge", "plan", str(recipe), "--ranks", str(RANKS), "--json"]
    done = subprocess.run(
        [*command, "--strategies", strategy, *sets], cwd=recipe.parent, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    (found,) = json.loads(done.stdout)
    if found["peak"] is None:
        sys.exit(f"not simulated: {found['unsimulated']}")
    peak: int = found["peak"]
    return peak


def large(folder: Path, models: list[str]) -> None:
    """Prints the CPU-seconds and the memory of plans of large models."""
    print("| model | strategy | ranks | CPU-seconds | memory, GB |\n|---|---|---|---|---|")
    for model in models:
        recipe = folder / "large.toml"
        recipe.write_text(HEAD + GPT.format(vocabulary=32000, block=2048, **LARGE[model]))
        sets = ["train.global_batch=1024", "train.micro_batch=1", "train.precision=bf16"]
        for strategy, ranks in PLANNED:
            command = [sys.executable, "-m", "ddpforge", "plan", str(recipe), "--ranks", str(ranks), "--device=h100"]
            # ru_maxrss is the maximum over all ended children, so each plan has its own parent process.
            code = "import json, resource, subprocess, sys;"
            code += "assert json.loads(subprocess.run(sys.argv[1:], capture_output=True).stdout)[0]['peak'];"
            code += "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
            code += "print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
            measured = [sys.executable, "-c", code, *command, "--strategies", strategy, "--json", *sets]
            done = subprocess.run(measured, cwd=folder, capture_output=True, text=True, check=True)
            seconds, memory = map(float, done.stdout.split())
            print(f"| {model} | {strategy} | {ranks} | {seconds:.1f} | {memory * 1024 / 1e9:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--cuda", action="store_true", help="measure on GPUs")
    parser.add_argument("--large", nargs="*", choices=list(LARGE), help="time and memory of plans for large models")
    options = parser.parse_args()
    if options.large is not None:
        with tempfile.TemporaryDirectory() as name:
            return large(Path(name), options.large or list(LARGE))
    print("| model | strategy | predicted, MiB | measured, MiB | error |\n|---|---|---|---|---|")
    worst = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "samples.py").write_text(DATA)
        for model in options.models:
            recipe = folder / f"{model}.toml"
            recipe.write_text(HEAD + MODELS[model])
            for label in options.strategies:
                strategy, *_ = label.split(",")
                sets = [*STRATEGIES[label], *OWN.get((model, label), [])]
                use, _, option = strategy.partition(":")
                own = [f"strategy.use={use}"]
                own += [f"strategy.{option if '=' in option else f'stage={option}'}"] if option else []
                expected = predicted(recipe, strategy, sets)
                found = measured(recipe, [*sets, *own], cuda=options.cuda)
                error = expected / found - 1
                worst = max(worst, abs(error))
                print(
                    f"| {model} | {label} | {expected / 2**20:.1f} | {found / 2**20:.1f} | {error:+.2%} |", flush=True
                )
    print(f"\nThe largest error is {worst:.2%}.")


if __name__ == "__main__":
    worker() if "--worker" in sys.argv[1:2] else main()
