"""A loop by hand and ddpforge, with the same model and data, on a pretended CUDA device that counts.

    python counted.py mlp    writes hand.json and ours.json: counts after each step, and the peak of the allocator

Steps between two logged rows are counted: rows are written at steps 1, 20 and 40.
"""

import gc
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from support.pretended_counts import COUNTS, counts

FIRST, LAST, STEPS = 23, 38, 40


class Features:
    """Pairs of 64 numbers and one of 10 classes."""

    random = False

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((64,), index / 512), index % 10


class Words:
    """Sequences of 128 tokens over an alphabet of 8,192, and the tokens after them."""

    random = False
    vocab_size, block_size = 8192, 128

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens = (torch.arange(129) * (index + 1)) % self.vocab_size
        return tokens[:-1], tokens[1:]


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
use = "single"
[train]
length = "40st"
global_batch = {batch}
clip_norm = 1.0
precision = "{precision}"
[track]
every = "20st"
[callbacks.each]
use = "./pretended_counts.py:EachStep"
file = "ours.json"
"""
MLP = {"data": "Features", "task": "classification", "batch": 64, "precision": "fp32"} | {
    "model": 'use = "mlp"\ninputs = 64\noutputs = 10\nhidden = [2048, 2048]'
}
GPT = {"data": "Words", "task": "language_modeling", "batch": 8, "precision": "bf16"} | {
    "model": 'use = "gpt"\nvocab_size = 8192\nblock_size = 128\nlayers = 3\nheads = 4\nwidth = 256'
}
WORKS = {"mlp": MLP, "gpt": GPT}


def model_of(name: str) -> nn.Module:
    from ddpforge.builtin.models.builders import gpt, mlp

    if name == "mlp":
        return mlp(inputs=64, outputs=10, hidden=[2048, 2048])
    return gpt(vocab_size=8192, block_size=128, layers=3, heads=4, width=256)


def batches(data: Any, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields pinned batches of a dataset, without end."""
    while True:
        for begin in range(0, len(data), size):
            x, y = default_collate([data[index] for index in range(begin, begin + size)])
            yield x.pin_memory(), y.pin_memory()


def by_hand(name: str) -> dict[str, Any]:
    """Trains in a loop as a careful user writes it; returns counts of each step and the allocator's peak."""
    work = WORKS[name]
    model = model_of(name).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    source = batches({"mlp": Features, "gpt": Words}[name](), work["batch"])
    rows = []
    for step in range(1, STEPS + 1):
        x, y = (part.to("cuda", non_blocking=True) for part in next(source))
        with torch.autocast("cuda", torch.bfloat16, enabled=work["precision"] == "bf16"):
            logits = model(x)
            loss = cross_entropy(logits.flatten(0, -2), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step in (1, 20, 40):
            loss.item()
        rows.append(counts() | {"step": step})
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
    return {"rows": rows, "peak": torch.cuda.max_memory_allocated()}


def ours(name: str) -> None:
    """Trains the recipe, whose callback writes the same. Ends the process."""
    from ddpforge.cli import main

    Path("ours.toml").write_text(RECIPE.format(**WORKS[name]))
    main(["run", "ours.toml"], prog_name="ddpforge")


def per_step(file: Path) -> dict[str, float]:
    """Returns the median counts of a step, and the peak in MiB.

    The median, because ranks agree about once a second: by the clock, not in a certain step.
    """
    found = json.loads(file.read_text())
    rows = found["rows"][FIRST:LAST]
    steps = {name: median_low(after[name] - row[name] for row, after in pairwise(rows)) for name in COUNTS}
    return steps | {"peak": found["peak"] / 2**20}


if __name__ == "__main__":
    Path("hand.json").write_text(json.dumps(by_hand(sys.argv[1])))
    gc.collect()
    torch.cuda.empty_cache()
    ours(sys.argv[1])
