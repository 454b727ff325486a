"""A gradient that is not finite never reaches the weights, nor what the optimizer keeps: on no device, at no step."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ddpforge.builtin.optim.optimizers import sgd
from ddpforge.strategies.precision import LossScaling, Precision

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # where a kernel decides; the numbers here stay on the CPU

PRECISIONS: dict[str, Callable[[], Precision]] = {
    "fp32 on a CPU": lambda: Precision(CPU),
    "fp32 on a GPU": lambda: Precision(GPU),
    "fp16": lambda: LossScaling(CPU),
}
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "momentum": lambda weights: sgd([{"params": weights}], lr=0.1, momentum=0.9),
    "nesterov": lambda weights: sgd([{"params": weights}], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "dampening": lambda weights: SGD(weights, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "two groups": lambda weights: SGD(
        [{"params": weights[:1], "momentum": 0.0}, {"params": weights[1:]}], lr=0.1, momentum=0.5, fused=True
    ),
    "no momentum": lambda weights: sgd([{"params": weights}], lr=0.1),
    "adamw": lambda weights: AdamW(weights, lr=0.1, fused=True),
    "amsgrad": lambda weights: Adam(weights, lr=0.1, amsgrad=True, fused=True),
    "adagrad": lambda weights: Adagrad(weights, lr=0.1, fused=True),
}

each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
each_optimizer = pytest.mark.parametrize("build", OPTIMIZERS.values(), ids=OPTIMIZERS)


@pytest.fixture(autouse=True)
def _junk() -> None:
    """What an allocator hands out next is not zero."""
    for size in (3, 5):
        _ = [torch.full((size,), 7e3) for _ in range(50)]


class Training:
    """Two weights, the gradients of which are given."""

    def __init__(self, precision: Precision, build: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        self.weights = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
        self.precision, self.optimizer = precision, build(self.weights)

    def step(self, *gradients: float | None) -> None:
        used = [(weight * g).sum() for weight, g in zip(self.weights, gradients, strict=True) if g is not None]
        self.precision.backward(torch.stack(used).sum())
        self.precision.unscale(self.optimizer)
        norm = torch.nn.utils.get_total_norm([weight.grad for weight in self.weights if weight.grad is not None])
        self.precision.update(self.optimizer, norm)
        for weight in self.weights:
            weight.grad = None

    def values(self) -> list[list[float]]:
        return [weight.tolist() for weight in self.weights]


@each_precision
@each_optimizer
def test_steps_that_are_left_out_are_as_if_they_had_not_been(
    precision: Callable[[], Precision], build: Callable[[list[nn.Parameter]], Optimizer]
) -> None:
    plain, skipping = Training(precision(), build), Training(precision(), build)
    for gradient in (1.0, 2.0, 0.5):
        plain.step(gradient, -gradient)
    for gradient in (torch.inf, 1.0, torch.nan, 2.0, torch.inf, 0.5):
        skipping.step(gradient, -gradient)
    assert skipping.values() == plain.values()


@each_precision
def test_the_first_step_after_a_resume_without_state_may_be_left_out_too(precision: Callable[[], Precision]) -> None:
    plain, resumed = (Training(precision(), OPTIMIZERS["momentum"]) for _ in range(2))
    resumed.step(3.0, 3.0)
    resumed.optimizer.load_state_dict(plain.optimizer.state_dict())
    resumed.weights[0].data.fill_(1.0)
    resumed.weights[1].data.fill_(1.0)

    for training, gradients in ((plain, (1.0, 2.0)), (resumed, (torch.inf, 1.0, 2.0))):
        for gradient in gradients:
            training.step(gradient, gradient)
    assert resumed.values() == plain.values()


@each_precision
@pytest.mark.parametrize("name", ["momentum", "nesterov", "dampening"])
def test_a_weight_whose_first_gradient_comes_later_begins_then(precision: Callable[[], Precision], name: str) -> None:
    """Under DDP with find_unused_parameters; torch's fused kernel takes momentum for all weights of a group or none."""
    late, alone = Training(precision(), OPTIMIZERS[name]), Training(precision(), OPTIMIZERS[name])
    late.step(1.0, None)
    late.step(torch.inf, 2.0)
    late.step(2.0, 2.0)
    late.step(1.0, 1.0)
    alone.step(None, 2.0)
    alone.step(None, 1.0)
    assert late.values()[1] == pytest.approx(alone.values()[1], rel=1e-6)
    for gradient in (1.0, 2.0, 1.0):
        alone.step(gradient, None)
    assert late.values()[0] == pytest.approx(alone.values()[0], rel=1e-6)


# ---------------------------------------------------------------------------------------------- the scale of fp16
def test_overflows_are_excused_until_the_loss_is_no_longer_scaled_up() -> None:
    """It starts at 2^16 and each overflow halves it: one at a scale of 1 is none of the scale."""
    training = Training(LossScaling(CPU), OPTIMIZERS["no momentum"])
    excused = []
    for _ in range(17):
        training.step(torch.inf, torch.inf)
        excused.append(training.precision.overflowed())
    assert excused == [True] * 16 + [False]
    assert training.precision.state()["loss_scale"] == 0.5


@pytest.mark.parametrize("precision", [PRECISIONS["fp32 on a CPU"], lambda: Precision(CPU, torch.bfloat16)])
def test_without_scaling_nothing_is_excused(precision: Callable[[], Precision]) -> None:
    training = Training(precision(), OPTIMIZERS["no momentum"])
    training.step(torch.inf, torch.inf)
    assert not training.precision.overflowed()
    assert training.precision.state() == {}


def test_a_resumed_run_raises_the_scale_at_the_step_at_which_it_would_have_been_raised() -> None:
    first, second = LossScaling(CPU), LossScaling(CPU)
    for scaling in (first, second):
        scaling.scaler.set_growth_interval(4)
    stopped, resumed = Training(first, OPTIMIZERS["no momentum"]), Training(second, OPTIMIZERS["no momentum"])
    for gradient in (torch.inf, 1.0, 1.0, 1.0):
        stopped.step(gradient, gradient)
    assert first.state() == {"loss_scale": 2.0**15, "loss_scale_growth_tracker": 3}

    second.load_state(first.state())
    assert second.state() == first.state()
    resumed.step(1.0, 1.0)
    assert second.state() == {"loss_scale": 2.0**16, "loss_scale_growth_tracker": 0}
