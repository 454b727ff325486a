"""A loop by hand and ddpforge, with the same model and data, on pretended CUDA devices that count.

    python counted.py mlp fp32 single    writes hand.json and ours.json: counts after each step, and the peak

It trains ours.toml, the `recipe` of the same arguments. Under ddp and fsdp it is one of two ranks, with a launcher's
variables, and rank 0 writes; PORT_OF_OURS is the port of the second process group. Steps between two logged rows are
counted: rows are written at steps 1, 20 and 40.
"""

import gc
import json
import os
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from support.pretended_counts import COUNTS, counts

FIRST, LAST, STEPS = 23, 38, 40
RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Features:
    """Pairs of 64 numbers and one of 10 classes."""

    random = False

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((64,), index / 512), index % 10


class Images:
    """Pairs of an image of 224 x 224 pixels and one of 1000 classes."""

    random = False

    def __len__(self) -> int:
        return 128

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((3, 224, 224), index / 128), index


class Words:
    """Sequences of 128 tokens over an alphabet of 8,192, and the tokens after them."""

    random = False
    vocab_size, block_size = 8192, 128

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(self.block_size + 1) * (index + 1)) % self.vocab_size
        return tokens[:-1], tokens[1:]


class ManyWords(Words):
    """Sequences of 1,024 tokens over an alphabet of 50,304."""

    vocab_size, block_size = 50_304, 1024


class Work(NamedTuple):
    """A model as a table of a recipe, its data and task, and the samples of a rank's batch."""

    model: str
    data: type
    task: str
    batch: int
    channels_last: bool = False


_GPT = 'use = "gpt"\nvocab_size = {}\nblock_size = {}\nlayers = {}\nheads = {}\nwidth = {}'
WORKS = {
    "mlp": Work('use = "mlp"\ninputs = 64\noutputs = 10\nhidden = [2048, 2048]', Features, "classification", 64),
    "gpt": Work(_GPT.format(8192, 128, 3, 4, 256), Words, "language_modeling", 8),
    "gpt-124m": Work(_GPT.format(50_304, 1024, 12, 12, 768), ManyWords, "language_modeling", 16),
    "resnet50": Work('use = "torchvision"\narch = "resnet50"\nclasses = 1000', Images, "classification", 16, True),
}
RECIPE = """
recipe = 2
name = "ours"
[model]
{model}
[data.train]
use = "./counted.py:{data}"
[task]
use = "{task}"
[optimizer]
use = "adamw"
lr = 1e-3
[strategy]
use = "{strategy}"
[train]
length = "40st"
global_batch = {batch}
clip_norm = 1.0
precision = "{precision}"
channels_last = {channels_last}
[track]
every = "20st"
[checkpoint]
every = "1000st"
[callbacks.each]
use = "./pretended_counts.py:EachStep"
file = "ours.json"
steps = 40
"""


def recipe(name: str, precision: str, strategy: str) -> str:
    """Returns the recipe of ddpforge's side."""
    work = WORKS[name]
    sharded = strategy == "fsdp"
    return RECIPE.format(
        model=work.model,
        data=work.data.__name__,
        task=work.task,
        strategy=strategy,
        batch=work.batch * (1 if strategy == "single" else 2),
        precision=precision,
        channels_last=str(work.channels_last and not sharded).lower(),
    )


def lowers(name: str, precision: str) -> bool:
    """True if FSDP gathers blocks in the compute dtype: BatchNorm needs its weights in float32."""
    return precision == "bf16" and name != "resnet50"


def model_of(name: str) -> nn.Module:
    import tomllib

    from ddpforge.builtin.models import builders, vision

    options = tomllib.loads(WORKS[name].model)
    use = options.pop("use")
    maker: Any = vision.torchvision_model if use == "torchvision" else getattr(builders, use)
    model: nn.Module = maker(**options)
    return model


def batches(data: Any, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pinned batches of a dataset, without end."""
    while True:
        for begin in range(0, len(data), size):
            x, y = default_collate([data[index] for index in range(begin, begin + size)])
            yield x.pin_memory(), y.pin_memory()


def spread(model: nn.Module, strategy: str, *, low: bool) -> nn.Module:
    """Returns the model in DDP, or sharded by FSDP. With `low`, blocks are gathered in bf16, and the rest in fp32."""
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model, device_ids=[RANK], gradient_as_bucket_view=True)
    if strategy == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32)
        for block in units(model):
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    return model


def units(model: nn.Module) -> list[nn.Module]:
    """Returns the blocks that FSDP gathers one by one."""
    lists = ("layer1", "layer2", "layer3", "layer4") if hasattr(model, "layer4") else ("blocks",)
    return [block for name in lists for block in getattr(model, name, [])]


def by_hand(name: str, precision: str, strategy: str) -> dict[str, Any]:
    """Trains in a loop as a careful user writes it; returns counts of each step and the allocator's peak."""
    work = WORKS[name]
    place = torch.device("cuda", RANK)
    torch.cuda.set_device(place)
    if RANKS > 1:
        dist.init_process_group("nccl")
    model = model_of(name).to(place)
    channels_last = work.channels_last and strategy != "fsdp"  # its shards are flat
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    wrapped = spread(model, strategy, low=lowers(name, precision))
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3, fused=True)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    source = batches(work.data(), work.batch)
    rows = []
    for step in range(1, STEPS + 1):
        x, y = (part.to(place, non_blocking=True) for part in next(source))
        if channels_last:
            x = x.to(memory_format=torch.channels_last)
        with torch.autocast("cuda", dtype, enabled=dtype is not None):
            logits = wrapped(x)
            loss = cross_entropy(logits.flatten(0, -2), y.flatten())
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(wrapped.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step in (1, 20, 40):
            loss.item()
        rows.append(counts() | {"step": step})
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
    peak = torch.cuda.max_memory_allocated()
    if RANKS > 1:
        dist.destroy_process_group()
    return {"rows": rows, "peak": peak}


def per_step(file: Path) -> dict[str, float]:
    """Returns the median counts of a step, and the peak in MiB.

    The median, because ranks agree about once a second: by the clock, not in a certain step.
    """
    found = json.loads(file.read_text())
    rows = found["rows"][FIRST:LAST]
    steps = {name: median_low(after[name] - row[name] for row, after in pairwise(rows)) for name in COUNTS}
    return steps | {"peak": found["peak"] / 2**20}


if __name__ == "__main__":
    found = by_hand(*sys.argv[1:])
    if RANK == 0:
        Path("hand.json").write_text(json.dumps(found))
    gc.collect()
    torch.cuda.empty_cache()
    if RANKS > 1:
        os.environ["MASTER_PORT"] = os.environ["PORT_OF_OURS"]

    from ddpforge.cli import main

    main(["run", "ours.toml"], prog_name="ddpforge")  # its callback writes the same
