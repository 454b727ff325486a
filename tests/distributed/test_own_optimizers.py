"""Optimizers with custom state resume exactly, from any strategy under any other."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, EACH, RECIPE, ZERO, Bench, weights_in

from ddpforge.checkpoint.reader import CheckpointReader

SINGLE = 'use = "single"'
GIVEN = RECIPE[RECIPE.index('use = "adamw"') : RECIPE.index("[strategy]")]


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Callable[[str], Bench]:
    copy(SUPPORT / "own_optimizers.py", tmp_path)

    def make(name: str) -> Bench:
        own = f'use = "{name if ":" in name else f"./own_optimizers.py:{name}"}"\nlr = 0.5\n'
        return Bench(tmp_path, ddpforge, RECIPE.replace(GIVEN, own))

    return make


def test_optimizer_counters_resume_under_any_strategy(bench: Callable[[str], Bench]) -> None:
    counting = bench("Counting")
    counting("straight", SINGLE, nproc=1, length="5st")
    expected = weights_in(counting.newest("straight"))
    chain = [SINGLE, EACH["zero3"], EACH["fsdp"], EACH["zero1"], DDP]
    for length, strategy in enumerate(chain, start=1):
        counting("moved", strategy, nproc=1 if strategy == SINGLE else 2, length=f"{length}st")
    for name, weight in weights_in(counting.newest("moved")).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-5, atol=1e-6)


def test_optimizer_state_that_cannot_be_saved_is_refused_at_the_first_save(bench: Callable[[str], Bench]) -> None:
    failed = bench("Remembering")("run", DDP, length="2st", fails=True)
    assert set(failed.codes) == {3}
    assert "Remembering changes its `attributes.rates.length`" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_global_step_size_is_refused_under_zero(bench: Callable[[str], Bench]) -> None:
    common = bench("Common")
    failed = common("zero", ZERO[1], length="2st", fails=True)
    assert set(failed.codes) == {3}
    assert "Common does not update each element of a parameter by itself" in failed.stderr


@pytest.mark.full  # tests/strategies/test_comm_hooks.py has its state
def test_powersgd_resumes_bitwise(bench: Callable[[str], Bench]) -> None:
    """Resumes before, at and after the first PowerSGD step; DDP sorts its buckets anew after every start."""
    powersgd = f'{DDP}\ncompression = "powersgd"\npowersgd_start = 3\npowersgd_rank = 2\nbucket_cap_mb = 1'
    wide = POINTS.format(hidden="[300, 400, 300]")
    adam = bench("torch.optim:Adam")
    adam("straight", powersgd, parts=wide, length="7st")
    for length in (2, 3, 5, 7):
        adam("parts", powersgd, parts=wide, length=f"{length}st")
    straight, resumed = (
        CheckpointReader(adam.newest("straight")).state(),
        CheckpointReader(adam.newest("parts")).state(),
    )
    assert straight.extra_state.keys() == resumed.extra_state.keys()
    assert {
        f"powersgd.{kind}" for kind in ("step", "error.layers.0.weight", "q.layers.3.weight")
    } < resumed.extra_state.keys()
    for one, other in ((straight.model, resumed.model), (straight.extra_state, resumed.extra_state)):
        for name, value in one.items():
            torch.testing.assert_close(read(value), read(other[name]), rtol=0, atol=0, msg=name)
    adam("parts", ZERO[1], length="8st", parts=wide)  # ZeRO ignores PowerSGD's state


POINTS = """
[model]
use = "mlp"
inputs = 4
hidden = {hidden}
outputs = 1
[data.train]
use = "./parts.py:Points"
[task]
use = "regression"
"""


def read(value: Any) -> torch.Tensor:
    return value.read() if hasattr(value, "read") else torch.as_tensor(value)


def test_powersgd_drops_a_nonfinite_gradient(bench: Callable[[str], Bench]) -> None:
    """Skips the step with the NaN sample; the steps after it train."""
    powersgd = f'{DDP}\ncompression = "powersgd"\npowersgd_start = 2'
    parts = POINTS.format(hidden="[16, 16]").replace("Points", "SpoiltPoints")
    adam = bench("torch.optim:Adam")
    adam("spoilt", powersgd, parts=parts, length="20st", train='on_nonfinite = "skip"')
    norms = adam.column("spoilt", "train/grad_norm")
    assert sum(norm is None for norm in norms) == 5  # one step in each of five epochs
