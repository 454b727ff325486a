"""A callback changes frozen weights, as momentum encoders do, with the same result under every strategy."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks
from support.sharding import DDP, FSDP, HSDP, ZERO, Bench, weights_in

SINGLE = 'use = "single"'
TAUGHT = """
[model]
use = "./parts.py:Taught"
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
"""
MOMENTUM = '[callbacks.momentum]\nuse = "./parts.py:Momentum"\n'
STRAIGHT = f"{MOMENTUM}straight = true\n"
OPTIONS = {"parts": TAUGHT, "length": "8st", "train": 'eval_every = "3st"'}


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


EARNEST = f"{ZERO[3]}\n[strategy.extra.zero_optimization]\nstage3_param_persistence_threshold = 0"
HOST = f'{ZERO[3]}\noffload_optimizer = "cpu"\noffload_parameters = "cpu"'
FAST = {"ddp": DDP, "fsdp": FSDP, "zero1": ZERO[1], "zero3": EARNEST}
OTHERS = {"hybrid": HSDP, "zero2": ZERO[2], "zero3": ZERO[3], "host": HOST}


@pytest.mark.parametrize("strategies", [FAST, pytest.param(OTHERS, marks=pytest.mark.full)], ids=["some", "others"])
def test_shards_of_frozen_weights_are_writable_under_every_strategy(bench: Bench, strategies: dict[str, str]) -> None:
    """Covers a teacher that is whole, really sharded, or sharded but kept gathered; checkpoints contain it."""
    bench("one", SINGLE, nproc=1, more=STRAIGHT, **OPTIONS)
    expected = weights_in(bench.newest("one"))
    for name, strategy in strategies.items():
        bench(name, strategy, nproc=4 if strategy == HSDP else 2, more=MOMENTUM, **OPTIONS)
        bench.alike(name, "one")
        for key, weight in weights_in(bench.newest(name)).items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")


@pytest.mark.parametrize("strategy", [FSDP, ZERO[1]], ids=["fsdp", "zero1"])
def test_direct_writes_to_unsharded_frozen_parameters_take_effect(bench: Bench, strategy: str) -> None:
    bench("one", SINGLE, nproc=1, more=STRAIGHT, **OPTIONS)
    bench("straight", strategy, more=STRAIGHT, **OPTIONS)
    bench.alike("straight", "one")


def test_direct_writes_to_sharded_parameters_are_refused(bench: Bench) -> None:
    failed = bench("straight", ZERO[3], more=STRAIGHT, fails=True, **OPTIONS)
    assert set(failed.codes) == {3}
    assert "a callback writes into parameter `teacher.0.weight` of the model" in failed.stderr
    assert "weights.frozen()" in failed.stderr
    assert "Traceback" not in failed.stderr
