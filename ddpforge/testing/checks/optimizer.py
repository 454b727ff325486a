"""Checks of optimizers: parameter groups, state by parameter, and an exact resume from it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.testing.cases import Case
from ddpforge.testing.multi_rank_runs import MultiRankRuns
from ddpforge.testing.registered_checks import check
from ddpforge.testing.report import Breach, NotApplicable, blame, source_of
from ddpforge.testing.settings import SETTINGS

_SHAPES = ((6, 4), (4,), (3, 2))
_MATRICES = ((6, 4), (4, 2), (3, 2))


@check("parameter-groups", "optimizer")
def parameter_groups(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that each group has its own settings, and that a learning rate of 0 keeps its weights unchanged."""
    weights = weights_of(case)
    groups: list[dict[str, Any]] = [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}]
    optimizer = build_optimizer(case, groups)
    if len(optimizer.param_groups) != 2:
        raise Breach("the two groups that were passed", f"{len(optimizer.param_groups)}")
    if any("lr" not in group for group in optimizer.param_groups):
        raise Breach(
            "`lr` in every group: the schedule sets it before each step", f"{sorted(optimizer.param_groups[0])}"
        )
    if "weight_decay" in optimizer.param_groups[0] and optimizer.param_groups[1]["weight_decay"] != 0:
        raise Breach("weight_decay = 0 in the group that sets it", f"{optimizer.param_groups[1]['weight_decay']}")
    optimizer.param_groups[0]["lr"] = 0.0
    before = [weight.detach().clone() for weight in weights]
    _step(case, optimizer, weights, 1)
    if not torch.equal(weights[0], before[0]):
        raise Breach("unchanged weights in a group of learning rate 0", "they changed", where=_method(optimizer))
    if torch.equal(weights[1], before[1]):
        raise Breach("changed weights in the other group", "no change", where=_method(optimizer))


@check("state-by-parameter", "optimizer")
def state_by_parameter(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the state is stored by parameter, in tensors and plain numbers."""
    weights = weights_of(case)
    optimizer = build_optimizer(case, [{"params": weights}])
    _step(case, optimizer, weights, 1)
    for key, entry in optimizer.state.items():
        if not any(key is weight for weight in weights):
            raise Breach("state by parameter", f"state under {key!r}", where=_method(optimizer))
        odd = {name: x for name, x in entry.items() if not isinstance(x, Tensor | int | float | bool | None)}
        if odd:
            name, value = next(iter(odd.items()))
            raise Breach(
                "state of tensors and numbers", f"`{name}` is a {type(value).__name__}", where=_method(optimizer)
            )


@check("resumes-exactly", "optimizer")
def resumes_exactly(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that a resume from the state and the weights equals an uninterrupted training."""
    straight = weights_of(case)
    optimizer = build_optimizer(case, [{"params": straight}])
    for step in range(1, 4):
        _step(case, optimizer, straight, step)
    saved, kept = copy.deepcopy(optimizer.state_dict()), [weight.detach().clone() for weight in straight]

    resumed = [nn.Parameter(weight) for weight in kept]
    other = build_optimizer(case, [{"params": resumed}])
    try:
        other.load_state_dict(saved)
    except Exception as error:
        raise blame(error, "state that can be loaded again", type(optimizer)) from error
    for step in range(4, 7):
        _step(case, optimizer, straight, step)
        _step(case, other, resumed, step)
    if any(not torch.equal(a, b) for a, b in zip(straight, resumed, strict=True)):
        raise Breach(
            "the same weights with and without an interruption after step 3",
            "other weights after step 6",
            where=_method(optimizer),
            hints=["keep everything in optimizer.state or param_groups, not in attributes"],
        )


@check("element-wise", "optimizer")
def element_wise(case: Case, worlds: MultiRankRuns) -> None:
    """Checks that the update is element-wise, as sharding strategies require, unless declared otherwise."""
    if case.settings.get("elementwise", True) is False:
        raise NotApplicable("declared: elementwise = false")
    whole = weights_of(case)[:1]
    pieces = [nn.Parameter(piece.clone()) for piece in torch.split(whole[0].detach().reshape(-1), [10, 14])]
    one, other = build_optimizer(case, [{"params": whole}]), build_optimizer(case, [{"params": pieces}])
    for step in range(1, 4):
        fill_gradients(whole, step)
        gradient = whole[0].grad
        assert gradient is not None
        for piece, part in zip(pieces, torch.split(gradient.reshape(-1), [10, 14]), strict=True):
            piece.grad = part.clone()
        one.step()
        other.step()
    if not torch.allclose(whole[0].reshape(-1), torch.cat([piece.detach() for piece in pieces]), rtol=1e-5, atol=1e-7):
        raise Breach(
            "the same update for a parameter and for flat pieces of it",
            "another update: it depends on whole parameters",
            where=_method(one),
            hints=[
                f"declare `elementwise = false` below [optimizer.{case.name}] in {case.said or SETTINGS}, and note in"
                " its docstring that FSDP and ZeRO cannot use it",
            ],
        )


def weights_of(case: Case) -> list[nn.Parameter]:
    """Returns new parameters for a trial, the same in each call."""
    generator = torch.Generator().manual_seed(0)
    shapes = _MATRICES if case.settings.get("matrices", False) else _SHAPES
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def fill_gradients(weights: list[nn.Parameter], step: int) -> None:
    """Sets the gradients of a step, which depend on its number alone."""
    generator = torch.Generator().manual_seed(step)
    for weight in weights:
        weight.grad = torch.randn(weight.shape, generator=generator)


def build_optimizer(case: Case, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Builds the optimizer of a case; raises Breach if it is none."""
    try:
        optimizer = case.build(params=groups)
    except Breach:
        raise
    except Exception as error:
        raise blame(error, "an optimizer of parameter groups", case.component) from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise Breach("a torch.optim.Optimizer", f"a {type(optimizer).__name__}")
    return optimizer


def _step(case: Case, optimizer: torch.optim.Optimizer, weights: list[nn.Parameter], step: int) -> None:
    fill_gradients(weights, step)
    try:
        optimizer.step()
    except Exception as error:
        raise blame(error, "a step without a closure", type(optimizer)) from error


def _method(optimizer: torch.optim.Optimizer) -> str:
    return source_of(type(optimizer).step)
