"""Auxiliary modules: the same curve under every strategy, and one that a resumed run continues."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks
from support.sharding import DDP, FSDP, HSDP, ZERO, Bench

from ddpforge.checkpoint.reader import CheckpointReader

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
OTHERS = {"hybrid": HSDP, "zero1": ZERO[1], "zero2": ZERO[2], "host": HOST, "meta": f"{FSDP}\nmeta = true"}


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge)


def auxiliary_weights(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    """Reads the weights of an auxiliary module from a checkpoint, whole."""
    return {key: saved.read() for key, saved in CheckpointReader(checkpoint).callbacks()[f"task.{name}"].items()}  # type: ignore


def assert_same_run(bench: Bench, name: str, rel: float = 1e-5) -> None:
    """Asserts that a run had the curve of `one`, and ended with the same auxiliary modules."""
    bench.alike(name, "one", rel)
    for module in ("target", "teacher", "rewarding"):
        expected = auxiliary_weights(bench.newest("one"), module)
        found = auxiliary_weights(bench.newest(name), module)
        assert found.keys() == expected.keys()
        for key, weight in found.items():
            torch.testing.assert_close(weight, expected[key], rtol=rel, atol=rel / 10, msg=f"{name}: {module}.{key}")


def test_auxiliary_modules_are_the_same_under_every_strategy_and_after_a_resume(bench: Bench) -> None:
    """Trains with a frozen teacher, a momentum encoder, and a module through which gradients flow to the model.

    The second run is stopped twice, continues under other strategies, and is evaluated afterwards.
    """
    bench("one", SINGLE, nproc=1, **OPTIONS)
    stops = "".join(f'[callbacks.at{n}]\nuse = "./parts.py:StopAt"\nstep = {n}\nrank = 0\n' for n in (3, 6))
    for strategy in (ZERO[3], DDP):
        assert set(bench("many", strategy, more=stops, fails=True, **OPTIONS).codes) == {75}
    bench("many", FSDP, more=stops, **OPTIONS)
    assert_same_run(bench, "many")
    found = json.loads(bench.ddpforge("eval", "runs/many", "--json", nproc=2).stdout)
    assert found["eval/loss"] == pytest.approx(bench.column("one", "eval/loss")[-1], rel=2e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_auxiliary_modules_are_the_same_under_other_strategies(bench: Bench, name: str) -> None:
    bench("one", SINGLE, nproc=1, **OPTIONS)
    bench(name, OTHERS[name], nproc=4 if name == "hybrid" else 2, **OPTIONS)
    assert_same_run(bench, name)


@pytest.mark.full
@pytest.mark.parametrize("strategy", [FSDP, ZERO[3]], ids=["fsdp", "zero3"])
def test_statistics_of_an_auxiliary_module_in_training_mode_are_reduced_over_ranks(bench: Bench, strategy: str) -> None:
    """Uses `virtual_ranks`: the statistics depend neither on the number of ranks nor on padding samples."""
    parts = ACCOMPANIED + "training = true\n"
    train = 'eval_every = "3st"\nvirtual_ranks = 4\ndrop_last = true'
    options = OPTIONS | {"parts": parts, "model": "normed = true", "train": train}
    bench("one", SINGLE, nproc=1, **options)
    bench("two", strategy, **options)
    assert_same_run(bench, "two", rel=1e-4)  # BatchNorm over four samples doubles a rounding error in every step
