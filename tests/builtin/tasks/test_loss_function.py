"""Losses of two lines: a function of outputs and targets is a task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.launched import Ranks
from torch import Tensor, nn

import ddpforge as package
from ddpforge.builtin.tasks.loss_function import LossFunction, adopted
from ddpforge.components.registry import Registry
from ddpforge.errors import UsageError
from ddpforge.training.task_checks import check_sum_reduction

INPUTS = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
BATCH = (INPUTS, torch.arange(8) % 3)


def mean(outputs: Tensor, targets: Tensor, *, smoothing: float = 0.0) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=smoothing)


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def build(function: Any, **options: Any) -> LossFunction:
    found: LossFunction = adopted(function)(**options)
    return found


@pytest.mark.parametrize("function", [mean, each, F.cross_entropy])
def test_the_loss_is_summed_over_samples(function: Callable[..., Tensor]) -> None:
    expected = F.cross_entropy(model()(INPUTS), BATCH[1], reduction="sum")
    torch.testing.assert_close(build(function).loss(model(), BATCH)[0], expected)


def test_options_are_those_of_the_function(tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(
        "def focal(outputs, targets, *, gamma: float = 2.0):\n    return outputs.sum() * gamma\n"
    )
    options = Registry.installed().options_model("task", "./losses.py:focal", tmp_path)
    assert list(options.model_fields) == ["gamma", "reduction", "metrics"]
    torchs = Registry.installed().options_model("task", "torch.nn.functional:smooth_l1_loss")
    assert "beta" in torchs.model_fields
    assert "reduction" not in torchs.model_fields


@pytest.mark.parametrize("declared", ["mean", "sum"])
def test_the_wrong_reduction_is_found_by_two_halves(declared: str) -> None:
    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    right, wrong = (summed, mean) if declared == "sum" else (mean, summed)
    check_sum_reduction(model(), build(right, reduction=declared), BATCH, 8)
    with pytest.raises(UsageError, match=f"but task.reduction is {declared}"):
        check_sum_reduction(model(), build(wrong, reduction=declared), BATCH, 8)


@pytest.mark.parametrize("returned", [0.5, torch.zeros(3), None])
def test_anything_but_a_loss_is_refused(returned: Any) -> None:
    with pytest.raises(UsageError, match="not one number, or one for each sample"):
        build(lambda outputs, targets: returned).loss(model(), BATCH)


def test_other_functions_are_left_alone() -> None:
    def task(*, gamma: float) -> None: ...

    def loss(model: Any, batch: Any) -> None: ...

    assert adopted(task) is task
    assert adopted(loss) is loss


RECIPE = """
recipe = 2
name = "function"
model = { use = "mlp", inputs = 64, outputs = 10 }
data.train = { use = "digits", split = "train" }
data.eval = { use = "digits", split = "test" }
task = { use = "./losses.py:smoothed", share = 0.1, metrics = ["accuracy"] }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "4st", global_batch = 32 }
"""
LOSSES = """
import torch.nn.functional as F


def smoothed(outputs, targets, *, share: float):
    return F.cross_entropy(outputs, targets, label_smoothing=share)
"""


def test_a_loss_function_trains_the_curve_of_the_task(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    (tmp_path / "losses.py").write_text(LOSSES)
    (tmp_path / "r.toml").write_text(RECIPE)
    ddpforge("run", "r.toml")
    ddpforge("run", "r.toml", "name=two", "train.micro_batch=8", nproc=2)
    ddpforge("run", "r.toml", "name=task", 'task={ use="classification", label_smoothing=0.1 }')
    runs = (package.load(tmp_path / f"runs/{name}").metrics()[-1]["eval/loss"] for name in ("function", "two", "task"))
    first, *others = runs
    assert others == pytest.approx([first, first], rel=1e-5)
