"""Unusual models train under every strategy as in one process, or are refused by name before the first update."""

from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, EACH, FSDP, RECIPE, ZERO, Bench
from support.torch_versions import needs_torch

SINGLE = 'use = "single"'
NAMES = {SINGLE: "single", **{strategy: name for name, strategy in EACH.items()}}
PARTS = """
[model]
use = "./odd_models.py:{name}"
[data.train]
use = "./parts.py:Points"
samples = 36
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "{task}"
"""
GIVEN = RECIPE[RECIPE.index('use = "adamw"') : RECIPE.index("[strategy]")]


class Odd(Bench):
    """Trains a model of `odd_models.py` for three steps."""

    def train(
        self, model: str, strategy: str, *, optimizer: str = "adamw", task: str = "regression", fails: bool = False
    ) -> Ranks:
        self.recipe = RECIPE.replace(GIVEN, f'use = "{optimizer}"\nlr = 1e-2\n')
        parts = PARTS.format(name=model, task=task)
        nproc = 1 if strategy == SINGLE else 2
        return self(f"{model}-{NAMES[strategy]}", strategy, parts=parts, nproc=nproc, length="3st", fails=fails)

    def column_of(self, model: str, strategy: str) -> list[float]:
        return self.column(f"{model}-{NAMES[strategy]}")


@pytest.fixture
def odd(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Odd:
    copy(SUPPORT / "odd_models.py", tmp_path)
    return Odd(tmp_path, ddpforge)


@pytest.mark.parametrize(
    ("model", "strategies"),
    [pytest.param("Odd", [DDP, FSDP, ZERO[1]], marks=needs_torch("2.12")), ("Double", [DDP, FSDP])],
    ids=["forms", "float64"],
)
def test_unusual_layouts_and_dtypes_have_the_curve_of_one_process(odd: Odd, model: str, strategies: list[str]) -> None:
    odd.train(model, SINGLE)
    for strategy in strategies:
        odd.train(model, strategy)
        assert odd.column_of(model, strategy) == pytest.approx(odd.column_of(model, SINGLE), rel=1e-5), strategy


@pytest.mark.parametrize(
    ("model", "strategy", "said"),
    [
        (
            "Double",
            ZERO[2],
            "parameter `layers.0.weight` is float64, but DeepSpeed stores and updates weights in float32",
        ),
        ("Odd", ZERO[3], "parameter `shift` is int16, which gloo and NCCL cannot gather under stage 3"),
        ("Following", FSDP, "forward changes parameter `teacher.weight` of `teacher` (Linear)"),
        ("Following", ZERO[3], "forward changes parameter `teacher.weight` of `teacher` (Linear)"),
        ("Hooked", FSDP, "parameter `head.weight` has a gradient hook"),
        ("Hollow", FSDP, "parameter `nothing` has no elements: FSDP cannot shard it"),
        ("Looked", FSDP, "`table` (Embedding) gives sparse gradients, but sharded gradients are dense"),
        ("Looked", ZERO[1], "`table` (Embedding) gives sparse gradients, but sharded gradients are dense"),
        ("Looked", DDP, "`table` (Embedding) gives sparse gradients, but AdamW does not take them"),
    ],
)
def test_models_that_a_strategy_cannot_train_are_refused(odd: Odd, model: str, strategy: str, said: str) -> None:
    refused(odd.train(model, strategy, fails=True), said)


@pytest.mark.parametrize("strategy", [FSDP, ZERO[1], ZERO[3]], ids=["fsdp", "zero1", "zero3"])
def test_gradient_penalty_with_sharded_weights_is_refused(odd: Odd, strategy: str) -> None:
    """Covers a former bug: ZeRO-1 silently trained another curve."""
    failed = odd.train("OwnSeed", strategy, task="./odd_models.py:Penalty", fails=True)
    refused(failed, "the loss computes gradients itself (torch.autograd.grad)")


@pytest.mark.parametrize("strategy", [FSDP, ZERO[3]], ids=["fsdp", "zero3"])
def test_a_sharded_weight_read_at_the_start_is_refused(odd: Odd, strategy: str) -> None:
    """Each rank would keep a number of its shard."""
    failed = odd.train("OwnSeed", strategy, task="./odd_models.py:WeighedAtStart", fails=True)
    refused(failed, "of the model while this rank may have only a part of it")


def test_metrics_of_a_whole_weight_in_evaluations_are_those_of_ddp(odd: Odd) -> None:
    for strategy in (DDP, FSDP, ZERO[3]):
        odd.train("OwnSeed", strategy, task="./odd_models.py:Weighed")
    expected = odd.column(f"OwnSeed-{NAMES[DDP]}", "eval/norm")
    for strategy in (FSDP, ZERO[3]):
        assert odd.column(f"OwnSeed-{NAMES[strategy]}", "eval/norm") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["Rprop", "Adafactor"])
def test_optimizers_that_cannot_update_shards_are_refused(odd: Odd, name: str) -> None:
    """Accepts an optimizer if it trains as under DDP: torch 2.15 updates shards with Rprop."""
    use = f"torch.optim:{name}"
    trained = odd.train("OwnSeed", FSDP, optimizer=use, fails=True)
    if any(trained.codes):
        refused(trained, f"{name} cannot be used under FSDP, which shards weights")
        return
    odd.train("OwnSeed", DDP, optimizer=use)
    assert odd.column_of("OwnSeed", FSDP) == pytest.approx(odd.column_of("OwnSeed", DDP), rel=1e-5)


def refused(failed: Ranks, said: str) -> None:
    assert set(failed.codes) <= {2, 3}
    assert said in failed.stderr
    assert "Traceback" not in failed.stderr
    assert "= help:" in failed.stderr
