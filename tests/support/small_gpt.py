"""A language model of 13,536 weights and a recipe that trains it under any strategy, in forked ranks."""

from pathlib import Path
from tempfile import TemporaryDirectory

from support.trained import Trained, trained

RECIPE = """
recipe = 2
name = "run"
[model]
use = "gpt"
vocab_size = 16
block_size = 8
layers = 4
heads = 2
width = 16
{model}
[data.train]
use = "./parts.py:RaggedTokens"
[data.eval]
use = "./parts.py:RaggedTokens"
samples = 11
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 3e-3
weight_decay = 0.1
no_decay = ["bias", "norm", "tokens.*"]
{optimizer}
[schedule]
use = "cosine"
warmup = "2st"
[strategy]
{strategy}
[train]
length = "{length}"
global_batch = {batch}
micro_batch = {micro}
clip_norm = 0.5
seed = 3
device = "cpu"
{train}
[checkpoint]
every = "2st"
[track]
every = "1st"
{more}
"""
DDP, PIPELINE = 'use = "ddp"', 'use = "pipeline"\nstages = 2\nschedule = "{}"'
SHARDED = 'data = "fsdp"\n'
BLOCK = 12 * 16**2 + 13 * 16
BOTH = "sequence_parallel = true\nloss_parallel = true"


def train(strategy: str, ranks: int, folder: Path | None = None, **text: str) -> list[Trained]:
    blank = dict.fromkeys(("model", "optimizer", "train", "more"), "") | {"length": "20st", "batch": "16", "micro": "2"}
    recipe = text.pop("recipe", RECIPE).format(**(blank | text), strategy=strategy)
    with TemporaryDirectory() as temporary:
        return trained(folder or Path(temporary), recipe, ranks)


def shared(schedule: str, stage: int) -> int:
    """Returns the number of elements on each of two tensor-parallel ranks of a stage.

    Each rank holds half of a block's matrices, of the biases of layers split by output rows, and of the vocabulary.
    """
    block = 12 * 16**2 // 2 + (3 + 4) * 16 // 2 + (1 + 1 + 4) * 16
    first, last = 256 // 2 + 128, 256 // 2 + 32
    if schedule == "ZBVZeroBubble":
        return 2 * block + (0 if stage else first + 32)
    return 2 * block + (last if stage else first)
