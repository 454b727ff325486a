"""A callback moves frozen weights, as momentum encoders do: under every strategy with the same result."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import Ranks
from sharding import DDP, EACH, FSDP, HSDP, ZERO, Bench, weights_in

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


def test_parts_of_frozen_weights_are_live_under_every_strategy(bench: Bench) -> None:
    """With the teacher kept whole, and sharded in earnest; the averages are in the checkpoint."""
    bench("one", SINGLE, nproc=1, more=STRAIGHT, **OPTIONS)
    earnest = f"{ZERO[3]}\n[strategy.extra.zero_optimization]\nstage3_param_persistence_threshold = 0"
    host = f'{ZERO[3]}\noffload_optimizer = "cpu"\noffload_parameters = "cpu"'
    expected = weights_in(bench.newest("one"))
    for name, strategy in {**EACH, "zero3-earnest": earnest, "zero3-host": host}.items():
        bench(name, strategy, more=MOMENTUM, **OPTIONS)
        bench.alike(name, "one")
        for key, weight in weights_in(bench.newest(name)).items():
            torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {key}")
    bench("hybrid", HSDP, nproc=4, more=MOMENTUM, **OPTIONS)
    bench.alike("hybrid", "one")


@pytest.mark.parametrize("strategy", [DDP, FSDP, ZERO[1], ZERO[2]], ids=["ddp", "fsdp", "zero1", "zero2"])
def test_writing_straight_into_frozen_parameters_counts(bench: Bench, strategy: str) -> None:
    bench("one", SINGLE, nproc=1, more=STRAIGHT, **OPTIONS)
    bench("straight", strategy, more=STRAIGHT, **OPTIONS)
    bench.alike("straight", "one")


def test_writing_straight_into_sharded_parameters_is_refused(bench: Bench) -> None:
    failed = bench("straight", ZERO[3], more=STRAIGHT, fails=True, **OPTIONS)
    assert set(failed.codes) == {3}
    assert "a callback writes into parameter `teacher.0.weight` of the model" in failed.stderr
    assert "weights.frozen()" in failed.stderr
    assert "Traceback" not in failed.stderr
