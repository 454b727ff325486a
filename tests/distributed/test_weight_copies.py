"""Strategies that shard weights keep no copies of weights in the dtype of the forward pass."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, FSDP, ZERO, Bench

PARTS = """
[model]
use = "./weight_copies.py:Net"
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "./weight_copies.py:Counting"
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    copy(SUPPORT / "weight_copies.py", tmp_path)
    return Bench(tmp_path, ddpforge)


def casts(bench: Bench, strategy: str, train: str = "", *, nproc: int = 1) -> set[tuple[str, int, int]]:
    """Returns the set of (training or evaluation, copies made, copies alive) of a run's forward passes."""
    bench("run", strategy, nproc=nproc, parts=PARTS, length="6st", train=f'precision = "bf16"\n{train}')
    found = {tuple(line.split()) for line in (bench.folder / "casts.txt").read_text().splitlines()}
    wrapped = "ddp" not in strategy  # the checks before wrapping run a copy of the model
    return {(kind, int(made), int(alive)) for name, kind, made, alive in found if not wrapped or name != "Net"}


def test_ddp_keeps_weight_copies(bench: Bench) -> None:
    """Shows that the counter works."""
    assert {("train", 16, 16), ("eval", 16, 16)} <= casts(bench, DDP)


@pytest.mark.parametrize("train", ["", "activation_checkpointing = true"], ids=["", "recomputed"])
@pytest.mark.parametrize("strategy", [FSDP, ZERO[3]], ids=["fsdp", "zero3"])
def test_sharded_weights_have_no_copies_in_lower_precision(bench: Bench, strategy: str, train: str) -> None:
    assert casts(bench, strategy, train) == {("train", 16, 0), ("eval", 16, 0)}


def test_repeated_casts_keep_the_losses(bench: Bench) -> None:
    """Allows DeepSpeed other rounding than autocast: it has its own linear layer."""
    for name, strategy, rel in (("single", 'use = "single"', 0), ("fsdp", FSDP, 0), ("zero3", ZERO[3], 0.02)):
        bench(name, strategy, nproc=1, parts=PARTS, length="8st", train='precision = "bf16"')
        assert bench.column(name) == pytest.approx(bench.column("single"), rel=rel, abs=0)
