"""Activation checkpointing changes no number of blocks that change their buffers, under any strategy."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
import torch
from launched import Ranks
from sharding import DDP, EACH, RECIPE, Bench
from torch import Tensor

from ddpforge.checkpoint.reader import Reader

PARTS = """
[model]
use = "./odd_models.py:NormedBlocks"
[data.train]
use = "./parts.py:Points"
samples = 36
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
"""
EXPLORING = RECIPE.replace('"adamw"\nlr = 1e-2\nweight_decay = 0.1', '"./exploring.py:Uphill"\nlr = 0.1')
SHARDS = "elastic_shards = 4"  # one rank computes several shards of a step, each with statistics of its own


def state(checkpoint: Path) -> dict[str, Tensor]:
    return {name: saved.read() for name, saved in Reader(checkpoint).state().model.items()}


@pytest.mark.parametrize(
    ("strategy", "recipe", "train", "kind"),
    [
        ('use = "single"', EXPLORING, SHARDS, "true"),
        (DDP, EXPLORING, SHARDS, "true"),
        pytest.param(EACH["fsdp"], RECIPE, SHARDS, "true", marks=pytest.mark.full),
        (EACH["fsdp"], RECIPE, SHARDS, '"selective"'),
        pytest.param(EACH["zero2"], RECIPE, "", "true", marks=pytest.mark.full),
        (EACH["zero3"], EXPLORING, "", "true"),
    ],
    ids=["single", "ddp", "fsdp", "fsdp, selective", "zero2", "zero3"],
)
def test_recomputing_changes_no_number(
    tmp_path: Path, ddpforge: Callable[..., Ranks], strategy: str, recipe: str, train: str, kind: str
) -> None:
    """Several micro-batches per step; with an optimizer that makes several passes, buffers go back after each."""
    bench = Bench(tmp_path, ddpforge, recipe)
    for name in ("odd_models.py", "exploring.py"):
        copy(Path(__file__).parents[1] / name, tmp_path)
    nproc = 1 if "single" in strategy else 2
    for name, more in (("kept", ""), ("recomputed", f"activation_checkpointing = {kind}\n")):
        bench(name, strategy, nproc=nproc, parts=PARTS, length="6st", train=f'{more}{train}\nblocks = ["_Normed"]')
    kept, recomputed = (state(bench.newest(name)) for name in ("kept", "recomputed"))
    assert kept["blocks.1.norm.num_batches_tracked"] >= 12
    for name, tensor in kept.items():
        assert torch.equal(recomputed[name], tensor), name
    assert bench.column("recomputed") == bench.column("kept")
    assert bench.column("recomputed", "eval/loss") == bench.column("kept", "eval/loss")
