"""Nonfinite gradients change neither weights nor optimizer state, on any device and at any step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ddpforge.builtin.optim.optimizers import sgd
from ddpforge.strategies.precision import LossScaling, Precision, precision_for

CPU, GPU = torch.device("cpu"), torch.device("cuda")  # for decisions of a kernel; the numbers here stay on the CPU

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
    """Fills freed memory with nonzero values."""
    for size in (3, 5):
        _ = [torch.full((size,), 7e3) for _ in range(50)]


class Training:
    """Two weights with given gradients."""

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
def test_skipped_steps_have_no_effect(
    precision: Callable[[], Precision], build: Callable[[list[nn.Parameter]], Optimizer]
) -> None:
    plain, skipping = Training(precision(), build), Training(precision(), build)
    for gradient in (1.0, 2.0, 0.5):
        plain.step(gradient, -gradient)
    for gradient in (torch.inf, 1.0, torch.nan, 2.0, torch.inf, 0.5):
        skipping.step(gradient, -gradient)
    assert skipping.values() == plain.values()


@each_precision
def test_the_first_step_after_a_resume_without_state_may_be_skipped(precision: Callable[[], Precision]) -> None:
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
def test_momentum_of_a_weight_starts_with_its_first_gradient(precision: Callable[[], Precision], name: str) -> None:
    """Happens under DDP with find_unused_parameters. torch's fused kernel uses momentum for all weights of a group or
    none."""
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


# ---------------------------------------------------------------------------------------------- fp16 loss scale
def test_overflows_are_excused_until_the_loss_scale_is_one() -> None:
    """Scaling starts at 2^16 and each overflow halves it: an overflow at a scale of 1 is not caused by the scale."""
    training = Training(LossScaling(CPU), OPTIMIZERS["no momentum"])
    excused = []
    for _ in range(17):
        training.step(torch.inf, torch.inf)
        excused.append(training.precision.overflowed())
    assert excused == [True] * 16 + [False]
    assert training.precision.state()["loss_scale"] == 0.5


@pytest.mark.parametrize("precision", [PRECISIONS["fp32 on a CPU"], lambda: Precision(CPU, torch.bfloat16)])
def test_without_loss_scaling_no_overflow_is_excused(precision: Callable[[], Precision]) -> None:
    training = Training(precision(), OPTIMIZERS["no momentum"])
    training.step(torch.inf, torch.inf)
    assert not training.precision.overflowed()
    assert training.precision.state() == {}


def test_a_resumed_run_raises_the_loss_scale_at_the_same_step() -> None:
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


# ---------------------------------------------------------------------------------------------- step results
@each_precision
def test_a_step_uses_the_unscaled_gradient(precision: Callable[[], Precision]) -> None:
    """SGD with a rate of 0.1 and a momentum of 0.9, by hand: momenta of 1 and 2.9."""
    training = Training(precision(), OPTIMIZERS["momentum"])
    for gradient in (1.0, 2.0):
        training.step(gradient, -gradient)
    assert training.values() == [[pytest.approx(0.61)] * 3, [pytest.approx(1.39)] * 5]


@each_precision
def test_a_nonfinite_step_in_which_only_some_weights_have_momentum_is_skipped(
    precision: Callable[[], Precision],
) -> None:
    """Uses one of two weights in the first step, which is not finite."""
    skipping, plain = (Training(precision(), OPTIMIZERS["momentum"]) for _ in range(2))
    skipping.step(torch.inf, None)
    skipping.step(torch.nan, 1.0)
    for training in (skipping, plain):
        training.step(1.0, None)
        training.step(1.0, 2.0)
    assert skipping.values() == plain.values()


def test_a_weight_with_momentum_is_updated_by_the_fused_kernel() -> None:
    """On a GPU the kernel then decides itself."""
    training = Training(Precision(GPU), OPTIMIZERS["momentum"])
    seen = []
    original = training.optimizer.step

    def step(closure: None = None) -> None:
        seen.append((training.optimizer.param_groups[0]["fused"], getattr(training.optimizer, "found_inf", None)))
        original()

    training.optimizer.step = step  # type: ignore[method-assign, assignment]
    for gradient in (torch.inf, 1.0, 1.0, torch.inf):
        training.step(gradient, gradient)
    assert [(fused, None if inf is None else inf.item()) for fused, inf in seen] == [
        (False, None),
        (True, 0.0),
        (True, 1.0),
    ]
    assert training.optimizer.found_inf is None  # type: ignore[attr-defined]
    assert training.optimizer.param_groups[0]["fused"]


def test_a_failed_update_restores_the_parameter_group() -> None:
    training = Training(Precision(GPU), OPTIMIZERS["momentum"])

    def step(closure: None = None) -> None:
        raise RuntimeError("no")

    training.optimizer.step = step  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        training.step(1.0, 1.0)
    assert training.optimizer.param_groups[0]["fused"]


def test_the_loss_scale_is_loaded_only_if_the_state_has_one() -> None:
    scaling = LossScaling(CPU)
    scaling.load_state({})
    assert scaling.state() == {"loss_scale": 2.0**16, "loss_scale_growth_tracker": 0}
    scaling.load_state({"loss_scale": 8.0, "loss_scale_growth_tracker": 5})
    assert scaling.state() == {"loss_scale": 8.0, "loss_scale_growth_tracker": 5}


def test_the_loss_scale_is_on_the_host_if_gradients_are() -> None:
    """Reads no number of the device of the forward passes: a meta tensor has none."""
    scaling = LossScaling(torch.device("meta"), CPU)
    weight = nn.Parameter(torch.ones(3))
    weight.grad = torch.full((3,), 2.0**16)
    scaling.unscale(torch.optim.SGD([weight], lr=1.0))
    assert weight.grad.tolist() == [1, 1, 1]


def test_an_overflow_without_an_update_lowers_the_loss_scale() -> None:
    training = Training(LossScaling(CPU), OPTIMIZERS["no momentum"])
    for gradient, scale in ((torch.inf, 2.0**15), (1.0, 2.0**15), (torch.inf, 2.0**14)):
        training.precision.backward((training.weights[0] * gradient).sum())
        training.precision.unscale(training.optimizer)
        training.precision.leave()
        training.weights[0].grad = None
        assert training.precision.state()["loss_scale"] == scale


# ---------------------------------------------------------------------------------------------- forward passes
@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_forward_pass_computes_in_the_dtype_that_the_recipe_names(name: Any, dtype: torch.dtype) -> None:
    precision, layer = precision_for(name, CPU), nn.Linear(2, 2)
    with precision.forward():
        assert layer(torch.ones(2)).dtype == dtype
    for compiled in (False, True):
        with precision.sharded_forward(compiled=compiled):
            assert layer(torch.ones(2)).dtype == dtype
            assert dtype == torch.float32 or not torch.is_autocast_cache_enabled()
    assert layer(torch.ones(2)).dtype == torch.float32
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize(
    ("name", "compiled", "kept"), [("bf16", False, 2.0), ("bf16", True, 1.0), ("fp32", False, 1.0)]
)
def test_sharded_forward_recomputes_casts_unless_compiled(name: Any, compiled: bool, kept: float) -> None:
    """Doubles the weight before the backward pass. In fp32 there is no copy; compiled code keeps its copy."""
    weight = nn.Parameter(torch.ones(2))
    x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    with precision_for(name, CPU).sharded_forward(compiled=compiled):
        loss = (weight.bfloat16() * x).sum()
    weight.data.mul_(2.0)
    loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert x.grad.tolist() == [kept, kept]
