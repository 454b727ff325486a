"""A mixture of experts trains one curve on any ranks, with its experts on every rank or spread over them."""

from collections.abc import Callable
from pathlib import Path

import pytest
from support.launched import Ranks
from support.sharding import FSDP, GPT, Bench, weights_in

MOE = GPT.replace('use = "gpt"', 'use = "moe_gpt"\nexperts = 4\ncapacity_factor = 1.0').replace(
    "language_modeling", "moe_language_modeling"
)
EXPERTS = f"{FSDP}\nexperts = 2"
MORE = """
[callbacks.ema]
decay = 0.9
{stop}
[checkpoint]
every = "100st"
"""
STOP = '[callbacks.stop]\nuse = "./parts.py:StopAt"\nstep = {}\nrank = 0'


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def go(bench: Bench, name: str, strategy: str = 'use = "ddp"', ranks: int = 2, end: int = 20, train: str = "") -> None:
    more = MORE.format(stop=STOP.format(end - 1) if end < 20 else "")
    train = f'eval_every = "10st"\n{train}'
    bench(name, strategy, nproc=ranks, parts=MOE, more=more, train=train, length="20st", fails=end < 20)


def alike(bench: Bench, name: str, other: str) -> None:
    bench.alike(name, other)
    for key in ("eval/dropped", "eval/balance", "eval/cross_entropy"):
        assert bench.column(name, key) == pytest.approx(bench.column(other, key), rel=1e-5)


def test_spread_experts_train_the_curve_of_one_process_and_go_on_from_its_checkpoint(bench: Bench) -> None:
    """Token-weighted, accumulated, clipped, with ragged steps, dropped tokens and a balance that counts."""
    go(bench, "one", ranks=1)
    go(bench, "experts", EXPERTS)
    alike(bench, "experts", "one")
    assert all(0.01 < dropped < 0.5 for dropped in bench.column("one", "eval/dropped"))
    assert all(1 < balance < 2 for balance in bench.column("one", "eval/balance"))
    assert {*weights_in(bench.newest("experts"))} == {*weights_in(bench.newest("one"))}


@pytest.mark.full
def test_neither_ranks_nor_layouts_matter(bench: Bench) -> None:
    go(bench, "one", ranks=1)
    go(bench, "ddp", ranks=4)
    go(bench, "fsdp", FSDP, ranks=4)
    go(bench, "two", EXPERTS, ranks=4, train="activation_checkpointing = true")
    go(bench, "four", f"{FSDP}\nexperts = 4", ranks=4)
    go(bench, "whole", f"{EXPERTS}\nno_sync = true\nmeta = true")
    for name in ("ddp", "fsdp", "two", "four", "whole"):
        alike(bench, name, "one")


@pytest.mark.full
def test_a_run_goes_from_layout_to_layout(bench: Bench) -> None:
    go(bench, "whole", ranks=1)
    ways = (('use = "ddp"', 2, 4), (EXPERTS, 2, 8), (FSDP, 2, 11), (EXPERTS, 4, 15), ('use = "ddp"', 1, 20))
    for strategy, ranks, end in ways:
        go(bench, "chain", strategy, ranks, end)
    assert bench.column("chain") == pytest.approx(bench.column("whole"), rel=5e-6)
