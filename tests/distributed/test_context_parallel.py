"""Context parallelism: runs that split sequences over ranks have the curve of runs with whole sequences."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.launched import Ranks
from support.sharding import FSDP, Bench

CONTEXT = f"{FSDP}\ncontext = 2"
MORE = """
[callbacks.ema]
decay = 0.9
[checkpoint]
every = "100st"
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def go(bench: Bench, name: str, strategy: str = 'use = "ddp"', ranks: int = 2, end: int = 20, train: str = "") -> None:
    bench(name, strategy, nproc=ranks, more=MORE, train=f'eval_every = "10st"\n{train}', length=f"{end}st")


def test_context_parallel_losses_equal_those_of_whole_sequences(bench: Bench) -> None:
    """Covers token weights, accumulation, clipping, and an uneven end."""
    go(bench, "ddp")
    go(bench, "context", CONTEXT)
    bench.alike("context", "ddp")


@pytest.mark.full
def test_context_parallel_groups_combine_with_data_parallelism(bench: Bench) -> None:
    go(bench, "ddp")
    go(bench, "shards", CONTEXT, ranks=4, train="activation_checkpointing = true")
    go(bench, "replicas", f"{CONTEXT}\nreplicas = 2", ranks=4, train="virtual_ranks = 4")
    go(bench, "chunks", f"{FSDP}\ncontext = 4", ranks=4)
    go(bench, "layers", f"{CONTEXT}\ntensor = 2\nloss_parallel = true", ranks=4)
    for name in ("shards", "chunks", "layers"):
        bench.alike(name, "ddp")
    go(bench, "elastic", train="virtual_ranks = 4")
    bench.alike("replicas", "elastic")


@pytest.mark.full
def test_run_resumes_with_whole_sequences_and_back(bench: Bench) -> None:
    go(bench, "whole", CONTEXT)
    for strategy, ranks, end in (
        (CONTEXT, 2, 4),
        ('use = "ddp"', 2, 8),
        (CONTEXT, 4, 12),
        (FSDP, 2, 16),
        (CONTEXT, 2, 20),
    ):
        stop = f'[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = {end - 1}\nrank = 0\n' if end < 20 else ""
        bench(
            "chain",
            strategy,
            nproc=ranks,
            more=MORE.replace("[checkpoint]", f"{stop}[checkpoint]"),
            train='eval_every = "10st"',
            length="20st",
            fails=end < 20,
        )
    assert bench.column("chain") == pytest.approx(bench.column("whole"), rel=5e-6)


@pytest.mark.full
@pytest.mark.parametrize("more", ["no_sync = true", "meta = true", "reshard_after_forward = false"])
def test_fsdp_options_keep_the_losses_of_whole_sequences(bench: Bench, more: str) -> None:
    go(bench, "ddp")
    go(bench, "context", f"{CONTEXT}\n{more}", ranks=4)
    bench.alike("context", "ddp")


@pytest.mark.full
def test_bf16_losses_stay_close(bench: Bench) -> None:
    go(bench, "ddp", train='precision = "bf16"')
    go(bench, "context", CONTEXT, train='precision = "bf16"')
    bench.alike("context", "ddp", rel=2e-2)
