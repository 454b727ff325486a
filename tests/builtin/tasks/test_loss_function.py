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
from ddpforge.guard.sum_reduction import check_sum_reduction

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


def _numbers(*shape: int) -> Tensor:
    return torch.randn(8, *shape, generator=torch.Generator().manual_seed(len(shape)))


def _classes(*shape: int) -> Tensor:
    return torch.randint(5, (8, *shape), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("function", "outputs", "targets"),
    [
        (F.mse_loss, _numbers(3), _numbers(3) * 2),
        (F.l1_loss, _numbers(3, 2), _numbers(3, 2) * 2),
        (F.smooth_l1_loss, _numbers(), _numbers() * 2),
        (F.huber_loss, _numbers(3), _numbers(3) * 2),
        (F.binary_cross_entropy_with_logits, _numbers(3), _numbers(3).sigmoid()),
        (F.poisson_nll_loss, _numbers(3), _numbers(3).exp()),
        (F.multilabel_soft_margin_loss, _numbers(3), _numbers(3).sign().relu()),
        (F.cross_entropy, _numbers(5), _classes()),
        (F.cross_entropy, _numbers(5), _numbers(5).softmax(1)),
        (F.cross_entropy, _numbers(5, 7), _classes(7)),
        (F.cross_entropy, _numbers(5, 4, 4), _classes(4, 4).masked_fill(_numbers(4, 4) < 0, -100)),
        (F.nll_loss, _numbers(5).log_softmax(1), _classes().masked_fill(_classes() == 2, -100)),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(list(value.shape)),
)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_functions_of_torch_have_their_own_mean_in_parts_of_any_size(
    function: Callable[..., Tensor], outputs: Tensor, targets: Tensor
) -> None:
    task, total, items = build(function), torch.zeros(()), torch.tensor(0)
    for part in (slice(0, 2), slice(2, 3), slice(3, 8)):
        batch = outputs[part], targets[part]
        total = total + task.loss(nn.Identity(), batch)[0]
        counted = task.count(batch)
        items = items + (len(batch[0]) if counted is None else counted)
    torch.testing.assert_close(total / items, function(outputs, targets))


def test_a_sum_over_one_value_of_each_sample_stays_the_same_number() -> None:
    outputs, targets = model()(INPUTS), BATCH[1]
    assert build(F.cross_entropy).loss(model(), BATCH)[0] == F.cross_entropy(outputs, targets, reduction="sum")


def test_a_function_that_only_adds_up_is_divided_by_samples() -> None:
    def own(outputs: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
        return F.cross_entropy(outputs, targets, reduction="mean" if reduction == "mean" else "sum")

    assert build(own).loss(model(), BATCH)[0] == F.cross_entropy(model()(INPUTS), BATCH[1], reduction="sum")


def test_a_mean_counts_the_samples_of_the_batch_and_not_its_targets() -> None:
    """Targets of a sample may be several rows."""
    task = build(lambda outputs, targets: outputs.mean())
    task.batch_samples = 4
    assert task.loss(nn.Identity(), (torch.ones(4, 2), torch.ones(12)))[0] == 4.0


@pytest.mark.parametrize("function", [mean, each, F.cross_entropy])
def test_the_loss_of_some_samples_is_the_sum_over_these(function: Callable[..., Tensor]) -> None:
    """Measures losses of sources: the task knows the size of the whole batch then."""
    task, outputs = build(function), model()(INPUTS)
    task.batch_samples = 8
    some = task.loss_from_outputs(outputs[:3], (INPUTS[:3], BATCH[1][:3]))
    torch.testing.assert_close(some, F.cross_entropy(outputs[:3], BATCH[1][:3], reduction="sum"))


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
