"""Optimizers with custom state resume exactly, from any strategy under any other."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, EACH, RECIPE, ZERO, Bench, weights_in

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
