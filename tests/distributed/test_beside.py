"""Modules beside the model: the same curve under every strategy, and one that a resumed run goes on with."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launched import Ranks
from sharding import DDP, FSDP, HSDP, ZERO, Bench

from ddpforge.checkpoint.reader import Reader

SINGLE = 'use = "single"'
ACCOMPANIED = """
[model]
use = "./parts.py:Net"
{model}
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "./parts.py:Accompanied"
teacher = {{ use = "./parts.py:Net" }}
"""
OPTIONS = {"parts": ACCOMPANIED, "length": "8st", "train": 'eval_every = "3st"'}
HOST = f'{ZERO[3]}\noffload_optimizer = "cpu"\noffload_parameters = "cpu"'
OTHERS = {"hybrid": HSDP, "zero1": ZERO[1], "zero2": ZERO[2], "host": HOST}


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def beside_in(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    """What a checkpoint holds of a module beside the model, whole."""
    return {key: saved.read() for key, saved in Reader(checkpoint).callbacks()[f"task.{name}"].items()}  # type: ignore


def alike(bench: Bench, strategies: dict[str, str]) -> None:
    bench("one", SINGLE, nproc=1, **OPTIONS)
    for name, strategy in strategies.items():
        bench(name, strategy, nproc=4 if strategy == HSDP else 2, **OPTIONS)
        bench.alike(name, "one", rel=2e-6)
        for module in ("target", "teacher", "rewarding"):
            expected = beside_in(bench.newest("one"), module)
            found = beside_in(bench.newest(name), module)
            assert found.keys() == expected.keys()
            for key, weight in found.items():
                torch.testing.assert_close(weight, expected[key], rtol=1e-5, atol=1e-6, msg=f"{name}: {module}.{key}")


def test_modules_beside_the_model_are_the_same_under_every_strategy(bench: Bench) -> None:
    """A frozen teacher, a momentum encoder, and a module through which gradients flow back to the model."""
    alike(bench, {"ddp": DDP, "fsdp": FSDP, "zero3": ZERO[3]})


@pytest.mark.full
def test_modules_beside_the_model_are_the_same_under_other_strategies(bench: Bench) -> None:
    alike(bench, OTHERS)
