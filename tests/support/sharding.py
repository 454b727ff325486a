"""Strategies that must give the same results, as the [strategy] tables of a recipe, and a recipe to run under them."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
from torch import Tensor

from ddpforge.checkpoint.reader import CheckpointReader
from support import SUPPORT
from support.launched import Ranks

DDP = 'use = "ddp"'
FSDP = 'use = "fsdp"'
HSDP = 'use = "fsdp"\nreplicas = 2'
ZERO = {stage: f'use = "deepspeed"\nstage = {stage}' for stage in (1, 2, 3)}


def weights_in(checkpoint: Path) -> dict[str, Tensor]:
    """Reads the model of a checkpoint, whole."""
    return {name: saved.read() for name, saved in CheckpointReader(checkpoint).state().model.items()}


EACH = {"ddp": DDP, "fsdp": FSDP, **{f"zero{stage}": table for stage, table in ZERO.items()}}


def _families(*now: str) -> list[Any]:
    """Parametrizes over strategies; those not in `now` run in `make test-all` only. ZeRO-2 differs in memory only."""
    names = ("ddp", "fsdp", "zero1", "zero3")
    return [pytest.param(EACH[name], id=name, marks=() if name in now else pytest.mark.full) for name in names]


_FAMILIES = _families("ddp", "zero3")
each_strategy = pytest.mark.parametrize("strategy", _FAMILIES)
"""Runs a test under every strategy: in `make test` under DDP, whose replica is FSDP's, too, and under ZeRO-3.

`tests/strategies/test_fsdp.py` and `test_zero.py` cover the steps of FSDP and ZeRO-1, and golden curves whole runs.
"""
ddp_and_zero = pytest.mark.parametrize("strategy", _families("ddp", "zero3"))
"""The same for tests in which FSDP and ZeRO share their code."""
each_strategy_and_one_process = pytest.mark.parametrize(
    ("strategy", "nproc"),
    [
        *(pytest.param(*each.values, 2, id=f"{each.id}@2", marks=each.marks) for each in _FAMILIES),
        pytest.param(DDP, 1, id="ddp@1"),
        *(pytest.param(*each.values, 1, id=f"{each.id}@1", marks=pytest.mark.full) for each in _FAMILIES[1:]),
    ],
)
"""The same on two ranks, and on one: under DDP, under others for `make test-all`."""

GPT = """
[model]
use = "gpt"
vocab_size = 16
block_size = 8
layers = 2
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
"""
CNN = """
[model]
use = "cnn"
width = 4
{model}
[data.train]
use = "digits"
split = "train"
[data.eval]
use = "digits"
split = "test"
[task]
use = "classification"
metrics = ["accuracy"]
"""
RECIPE = """
recipe = 2
name = "{name}"
{parts}
[optimizer]
use = "adamw"
lr = 1e-2
weight_decay = 0.1
no_decay = ["bias", "norm"]
[schedule]
use = "cosine"
warmup = "5st"
[strategy]
{strategy}
[train]
length = "{length}"
global_batch = 12
micro_batch = 3
clip_norm = 0.5
seed = 3
{train}
[track]
every = "1st"
{more}
"""


class Bench:
    """Runs the recipe in one folder, under any strategy on any number of ranks, and reads its results.

    Ten steps cover the warm-up, a part of the schedule, and the ragged ends of two epochs.
    """

    def __init__(self, folder: Path, ddpforge: Callable[..., Ranks], recipe: str = RECIPE) -> None:
        self.folder, self.ddpforge, self.recipe = folder, ddpforge, recipe
        copy(SUPPORT / "parts.py", folder)

    def __call__(
        self,
        name: str,
        strategy: str = DDP,
        *,
        nproc: int = 2,
        parts: str = GPT,
        fails: bool = False,
        env: dict[str, str] | None = None,
        **text: Any,
    ) -> Ranks:
        options = {"model": "", "train": "", "more": "", "length": "10st", "strategy": strategy, "name": name} | text
        parts = parts.format(model=options.pop("model"))
        (self.folder / f"{name}.toml").write_text(self.recipe.format(parts=parts, **options))
        return self.ddpforge("run", f"{name}.toml", nproc=nproc, fails=fails, env=env)

    def column(self, name: str, key: str = "train/loss") -> list[float]:
        rows = map(json.loads, (self.folder / f"runs/{name}/metrics.jsonl").read_text().splitlines())
        return [row[key] for row in rows if key in row]

    def newest(self, name: str) -> Path:
        """Returns the newest checkpoint of a run."""
        return max((self.folder / f"runs/{name}/checkpoints").glob("step-*"))

    def alike(self, name: str, other: str, rel: float = 1e-5) -> None:
        """Asserts that two runs have the same curves."""
        for key, tolerance in (("train/loss", rel), ("train/grad_norm", 10 * rel), ("eval/loss", rel), ("lr", 1e-12)):
            assert self.column(name, key) == pytest.approx(self.column(other, key), rel=tolerance), key
        assert self.column(name)
