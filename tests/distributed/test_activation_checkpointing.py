"""Activation checkpointing and offload keep every number of blocks that change their buffers, under any strategy."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, EACH, RECIPE, Bench
from torch import Tensor

from ddpforge.checkpoint.reader import CheckpointReader

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
SHARDS = "virtual_ranks = 4"  # one rank computes several shards of a step, each with statistics of its own


def state(checkpoint: Path) -> dict[str, Tensor]:
    return {name: saved.read() for name, saved in CheckpointReader(checkpoint).state().model.items()}


@pytest.mark.parametrize(
    ("strategy", "recipe", "train", "kind"),
    [
        ('use = "single"', EXPLORING, SHARDS, "true"),
        pytest.param(DDP, EXPLORING, SHARDS, "true", marks=pytest.mark.full),  # replicas recompute as one process does
        pytest.param(EACH["fsdp"], RECIPE, SHARDS, "true", marks=pytest.mark.full),
        (EACH["fsdp"], RECIPE, SHARDS, '"selective"'),
        pytest.param(EACH["zero2"], RECIPE, "", "true", marks=pytest.mark.full),
        (EACH["zero3"], EXPLORING, "", "true"),
    ],
    ids=["single", "ddp", "fsdp", "fsdp, selective", "zero2", "zero3"],
)
def test_activation_checkpointing_keeps_weights_and_losses(
    tmp_path: Path, ddpforge: Callable[..., Ranks], strategy: str, recipe: str, train: str, kind: str
) -> None:
    """Uses several micro-batches per step; multi-pass optimizers restore the buffers after each pass."""
    bench = Bench(tmp_path, ddpforge, recipe)
    for name in ("odd_models.py", "exploring.py"):
        copy(SUPPORT / name, tmp_path)
    nproc = 1 if "single" in strategy else 2
    for name, more in (("kept", ""), ("recomputed", f"activation_checkpointing = {kind}\n")):
        bench(name, strategy, nproc=nproc, parts=PARTS, length="6st", train=f'{more}{train}\nblocks = ["_Normed"]')
    kept, recomputed = (state(bench.newest(name)) for name in ("kept", "recomputed"))
    assert kept["blocks.1.norm.num_batches_tracked"] >= 12
    for name, tensor in kept.items():
        assert torch.equal(recomputed[name], tensor), name
    assert bench.column("recomputed") == bench.column("kept")
    assert bench.column("recomputed", "eval/loss") == bench.column("kept", "eval/loss")


ATTENDING = PARTS.replace("NormedBlocks", "Attending")


@pytest.mark.parametrize(
    ("strategy", "nproc"),
    [
        pytest.param('use = "single"', 1, id="single"),
        pytest.param(DDP, 2, id="ddp", marks=pytest.mark.full),  # computes as "single" does
        pytest.param(EACH["fsdp"], 2, id="fsdp"),
        pytest.param(EACH["zero1"], 2, id="zero1", marks=pytest.mark.full),
        pytest.param(EACH["zero2"], 2, id="zero2", marks=pytest.mark.full),
        pytest.param(EACH["zero3"], 2, id="zero3", marks=pytest.mark.full),  # the test above has zero3
        pytest.param('use = "pipeline"\nstages = 2', 2, id="pipeline", marks=pytest.mark.full),
    ],
)
def test_activation_checkpointing_of_attention_with_in_place_changes_keeps_the_losses(
    tmp_path: Path, ddpforge: Callable[..., Ranks], strategy: str, nproc: int
) -> None:
    bench = Bench(tmp_path, ddpforge)
    odd = (SUPPORT / "odd_models.py").read_text()
    everything = "from ddpforge.features import activation_offload\nactivation_offload.SMALLEST = 1\n"
    (tmp_path / "odd_models.py").write_text(odd + everything)
    kinds = {
        "kept": "activation_checkpointing = false",
        "recomputed": "activation_checkpointing = true",
        "selective": 'activation_checkpointing = "selective"',
        "recomputed-offloaded": "activation_checkpointing = true\nactivation_offload = true",
        "offloaded": "activation_offload = true",
    }
    for name, more in kinds.items():
        bench(name, strategy, nproc=nproc, parts=ATTENDING, length="6st", train=more)
    for name in kinds:
        for key in ("train/loss", "train/grad_norm", "eval/loss"):
            assert bench.column(name, key) == bench.column("kept", key), (name, key)
