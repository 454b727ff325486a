"""Multi-pass optimizers have the same result under every strategy."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks
from support.sharding import DDP, HSDP, ZERO, each_strategy, weights_in
from torch import Tensor

RECIPE = """
recipe = 2
name = "run"
[model]
use = "./exploring.py:Bowl"
{model}
[data.train]
use = "./parts.py:Values"
values = [1.0, 2.0, 3.0, 5.0, 9.0]
{data}
[task]
use = "./parts.py:SumOfLosses"
[optimizer]
use = "./exploring.py:Uphill"
{optimizer}
[strategy]
{strategy}
[train]
length = "{length}"
global_batch = 6
micro_batch = 1
{train}
[track]
every = "1st"
"""
START = torch.tensor([0.0, 1.0, 3.0])


class Run:
    """One recipe in one folder."""

    def __init__(self, folder: Path, ddpforge: Callable[..., Ranks]) -> None:
        self.folder, self.ddpforge = folder, ddpforge
        for name in ("parts.py", "exploring.py"):
            copy(SUPPORT / name, folder)

    def __call__(self, *, nproc: int = 2, fails: bool = False, **text: Any) -> Ranks:
        blank = dict.fromkeys(("model", "data", "optimizer", "train"), "")
        options = blank | {"length": "3st", "strategy": DDP} | text
        (self.folder / "run.toml").write_text(RECIPE.format(**options))
        return self.ddpforge("run", "run.toml", "--fresh", nproc=nproc, fails=fails)

    def saved(self) -> dict[str, Tensor]:
        return weights_in(max((self.folder / "runs/run/checkpoints").glob("step-*")))

    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "runs/run/metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Run:
    return Run(tmp_path, ddpforge)


def by_hand(
    steps: int, *, passes: int = 2, rho: float = 0.5, lr: float = 0.1, clip: float = math.inf
) -> list[tuple[Tensor, Tensor]]:
    """Returns for each step the weights before it and the gradient that it used, and the last weights."""
    weight, found = START, []
    for _ in range(steps):
        there = weight
        for _ in range(1, passes):
            gradient = there - 4.0
            there = there + rho * gradient / gradient.norm()
        gradient = there - 4.0
        found.append((weight, gradient))
        weight = weight - lr * gradient * min(1.0, clip / (gradient.norm().item() + 1e-6))
    return [*found, (weight, weight)]


@each_strategy
@pytest.mark.parametrize("passes", [pytest.param(2, marks=pytest.mark.full), 3])
def test_multi_pass_curve_equals_the_formula(run: Run, strategy: str, passes: int) -> None:
    """Uses five samples in micro-batches of one on two ranks: accumulation, and a padding sample on rank 0."""
    run(strategy=strategy, optimizer=f"passes = {passes}")
    *steps, (end, _) = by_hand(3, passes=passes)
    torch.testing.assert_close(run.saved()["weight"], end)
    rows = run.rows()
    assert [row["train/grad_norm"] for row in rows] == pytest.approx([g.norm().item() for _, g in steps], rel=1e-5)
    # The loss is that of the weights that are trained: half the squared distance to 4, and the data's variance of 8.
    losses = [0.5 * ((w - 4).square() + 8).sum().item() for w, _ in steps]
    assert [row["train/loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["samples"] for row in rows] == [5, 10, 15]
    assert run.saved()["seen"] == 6  # two samples per step on rank 0, counted in the first pass only


def test_multi_pass_optimizer_under_hsdp_zero2_and_one_process(run: Run) -> None:
    for strategy, nproc in (('use = "single"', 1), (HSDP, 2), (ZERO[2], 2)):
        run(strategy=strategy, nproc=nproc)
        torch.testing.assert_close(run.saved()["weight"], by_hand(3)[-1][0])


@each_strategy
def test_only_the_last_gradient_is_clipped(run: Run, strategy: str) -> None:
    run(strategy=strategy, train="clip_norm = 0.5")
    torch.testing.assert_close(run.saved()["weight"], by_hand(3, clip=0.5)[-1][0])


@each_strategy
def test_each_pass_draws_the_same_random_numbers(run: Run, strategy: str) -> None:
    """Makes a second pass at the same weights, which changes nothing if the noise is the same."""
    run(strategy=strategy, model="noise = 1.0", optimizer="rho = 0.0\npasses = 1")
    once = run.saved()
    run(strategy=strategy, model="noise = 1.0", optimizer="rho = 0.0\npasses = 2")
    assert run.saved().keys() == once.keys()
    assert all(torch.equal(tensor, once[name]) for name, tensor in run.saved().items())


@each_strategy
def test_skipped_step_restores_perturbed_weights(run: Run, strategy: str) -> None:
    """Perturbs beyond the range of fp32: the second gradient is infinite, and there is no third pass."""
    run(strategy=strategy, optimizer="rho = 1e39\npasses = 3", train='on_nonfinite = "skip"')
    assert torch.equal(run.saved()["weight"], START)
    *_, last = rows = run.rows()
    assert (last["samples"], last["train/skipped_steps"]) == (15, 3)
    assert {row["train/loss"] for row in rows} == {25.0}  # forward passes use them too


@each_strategy
def test_step_with_a_nonfinite_first_gradient_is_skipped(run: Run, strategy: str) -> None:
    run(strategy=strategy, data="nan = 2", train='on_nonfinite = "skip"', length="2st")
    assert torch.equal(run.saved()["weight"], START)
    assert run.rows()[-1]["train/skipped_steps"] == 2


@each_strategy
@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_lower_precision_stays_close_to_the_formula(run: Run, strategy: str, precision: str) -> None:
    run(strategy=strategy, train=f'precision = "{precision}"')
    torch.testing.assert_close(run.saved()["weight"], by_hand(3)[-1][0], rtol=1e-2, atol=1e-2)


def test_strategy_without_multi_pass_support_is_refused(run: Run) -> None:
    failed = run(strategy='use = "./exploring.py:OnePass"', nproc=1, fails=True)
    assert failed.codes == [3]
    assert "Uphill makes 2 passes per step, but the strategy supports only optimizers that make one" in failed.stderr
    assert "Traceback" not in failed.stderr
