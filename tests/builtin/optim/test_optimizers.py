"""The optimizers `adamw`, `sgd` and `lbfgs` equal torch's."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ddpforge.builtin.optim.optimizers import adamw, lbfgs, sgd
from ddpforge.errors import StrategyError
from ddpforge.strategies.optimizer_probe import check_independent_updates
from ddpforge.training.parameter_groups import parameter_groups

Build = Callable[[list[dict[str, Any]]], Optimizer]


def trained(build: Build) -> list[Tensor]:
    """Returns the weights of a small model after five steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = build(parameter_groups(model, ["bias", "norm"]))
    for _ in range(5):
        model(torch.randn(32, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("ours", "torchs"),
    [
        (
            lambda groups: adamw(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
            lambda groups: AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=False),
        ),
        (
            lambda groups: adamw(groups, lr=1e-2, amsgrad=True),
            lambda groups: AdamW(groups, lr=1e-2, amsgrad=True, fused=False),
        ),
        (
            lambda groups: sgd(groups, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1),
            lambda groups: SGD(groups, lr=1e-3, momentum=0.9, nesterov=True, weight_decay=0.1, fused=False),
        ),
        (lambda groups: sgd(groups, lr=1e-3), lambda groups: SGD(groups, lr=1e-3, fused=False)),
    ],
    ids=["adamw", "amsgrad", "sgd with momentum", "sgd"],
)
def test_fused_updates_equal_those_of_torchs_loop(ours: Build, torchs: Build) -> None:
    for weight, expected in zip(trained(ours), trained(torchs), strict=True):
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("build", [adamw, sgd])
def test_fused_kernel_is_used_if_every_parameter_supports_it(build: Callable[..., Optimizer]) -> None:
    real, complex_ = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    assert build([{"params": [real]}], lr=0.1).defaults["fused"] is True
    assert build([{"params": [real, complex_]}], lr=0.1).defaults["fused"] is False
    assert build([{"params": [real]}], lr=0.1, fused=False).defaults["fused"] is False


def test_parameter_group_keeps_its_own_weight_decay() -> None:
    layer = nn.LayerNorm(4)
    optimizer = adamw(parameter_groups(nn.Sequential(layer, nn.Linear(4, 4)), ["norm"]), lr=0.1, weight_decay=0.3)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_one_step_of_sgd_subtracts_the_gradient_times_the_rate() -> None:
    w = nn.Parameter(torch.tensor(1.0))
    optimizer = sgd([{"params": [w]}], lr=0.5)
    w.grad = torch.tensor(3.0)
    optimizer.step()
    assert w.item() == -0.5


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(ValueError, match="Nesterov momentum requires a momentum"):
        sgd([{"params": [nn.Parameter(torch.zeros(1))]}], lr=0.1, nesterov=True)


# ---------------------------------------------------------------------------------------------- L-BFGS
def curve(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Returns the losses of `steps` steps on a small regression."""
    inputs = torch.randn(40, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean()
        loss.backward()
        return loss

    theirs: Any = optimizer
    for _ in range(steps):
        if isinstance(optimizer, torch.optim.LBFGS):
            losses.append(theirs.step(closure).item())
        else:
            losses.append(closure().item())
            optimizer.step()
    return losses


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)).double()


@pytest.mark.parametrize("history_size", [3, 10])
def test_lbfgs_has_the_curve_of_torchs_with_one_iteration_a_step(history_size: int) -> None:
    ours, theirs = net(), net()
    mine = curve(ours, lbfgs([{"params": list(ours.parameters())}], lr=0.5, history_size=history_size), 50)
    options: dict[str, Any] = {"lr": 0.5, "max_iter": 1, "history_size": history_size}
    assert mine == pytest.approx(curve(theirs, torch.optim.LBFGS(theirs.parameters(), **options), 50), rel=1e-7)
    assert mine[-1] < 0.02 * mine[0]


def test_lbfgs_resumes_from_the_state_of_each_weight() -> None:
    straight, again = net(), net()
    optimizer = lbfgs([{"params": list(straight.parameters())}], lr=0.5)
    curve(straight, optimizer, 12)
    again.load_state_dict(straight.state_dict())
    resumed = lbfgs([{"params": list(again.parameters())}], lr=0.5)
    resumed.load_state_dict(deepcopy(optimizer.state_dict()))
    assert curve(again, resumed, 5) == curve(straight, optimizer, 5)


def test_lbfgs_keeps_weights_at_a_gradient_of_zero() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = lbfgs([{"params": [weight]}], lr=1.0)
    for _ in range(2):
        weight.grad = torch.zeros(3)
        optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("together", [True, False], ids=["lbfgs", "adamw"])
def test_strategies_that_divide_the_model_refuse_updates_of_all_weights_together(together: bool) -> None:
    optimizer = (lbfgs if together else adamw)([{"params": [nn.Parameter(torch.ones(3))]}], lr=0.1)
    with pytest.raises(StrategyError, match="updates all weights together") if together else nullcontext():
        check_independent_updates(optimizer, torch.device("cpu"))
