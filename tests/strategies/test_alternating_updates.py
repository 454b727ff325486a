"""Alternating updates under every strategy that supports them, with values checked by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from support.forked import Training, in_ranks, saved
from torch import Tensor, nn
from torch.optim import SGD

from ddpforge.interfaces import Strategy
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP


class Product(nn.Module):
    """Computes a·b·x, with two elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor([1.0, 1.0])), nn.Parameter(torch.tensor([1.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.a * self.b * x


def optimizer(weights: Any) -> AlternatingOptimizer:
    a, b = weights
    return AlternatingOptimizer({"a": SGD([a], lr=1.0, momentum=0.9), "b": SGD([b], lr=1.0)}, {"a": None, "b": 2.0})


def take(training: Training, turn: str, *inputs: Tensor) -> float:
    with training.replica.select_update(turn):
        training.model = training.replica.module
        return training.step(*inputs)


def whole(training: Training) -> dict[str, list[float]]:
    """Returns the full weights, gathered over ranks."""
    found = {}
    for name, part in training.replica.weights.shards().items():
        mine = torch.zeros(part.shape).flatten()
        mine[part.region.start : part.region.stop] = part.tensor.flatten()
        found[name] = (training.world.global_ranks.all_reduce_sum(mine) / part.replicas).tolist()
    return found


def duel(build: Callable[[], Strategy]) -> Callable[[int], Any]:
    """Returns an action for a step with both updates. Ranks have 1 and 2 for x, in two micro-batches of a half each."""

    def action(rank: int) -> Any:
        training = Training(build(), Product, optimizer)
        half = torch.full((2,), (rank + 1.0) / 2)
        norms = [take(training, turn, half, half) for turn in ("a", "b")]
        clean = all(p.grad is None and p.requires_grad for p in training.replica.unwrapped.parameters())
        state = training.replica.state()
        return norms, whole(training), clean, {name: sorted(entry) for name, entry in state.optimizer.items()}

    return action


@pytest.mark.parametrize(
    "build", [DDP, FSDP, lambda: FSDP(replicas=2), lambda: DDP(static_graph=True), lambda: FSDP(no_sync=True)]
)
def test_the_second_update_uses_the_weights_of_the_first(build: Callable[[], Strategy]) -> None:
    """With the gradient of a, 1.5·b, and that of b, 1.5·a with the new a, clipped to a norm of 2."""
    (norms, weights, clean, state), other = in_ranks(2, duel(build))
    assert norms == pytest.approx([math.hypot(1.5, 3.0), math.hypot(0.75, 3.0)])
    assert weights["a"] == pytest.approx([1 - 1.5, 1 - 3.0])
    factor = 2 / math.hypot(0.75, 3.0)
    assert weights["b"] == pytest.approx([1 + 0.75 * factor, 2 + 3.0 * factor])
    assert clean
    assert state == {"a": ["momentum_buffer"]}
    assert other[:2] == (norms, weights)


def test_alternating_updates_work_with_tensor_parallelism() -> None:
    """Each update trains one of two layers. Ranks hold columns of the first and rows of the second."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        layers.tensor_plan = {"0": "colwise", "2": "rowwise"}
        return layers

    def split(weights: Any) -> AlternatingOptimizer:
        first, bias, *second = weights
        return AlternatingOptimizer({"a": SGD([first, bias], lr=0.5), "b": SGD(second, lr=0.5)}, {"a": 0.5, "b": None})

    def action(strategy: Strategy) -> list[float]:
        training = Training(strategy, build, split)
        return [take(training, turn, torch.arange(8.0).view(2, 4)) for turn in ("a", "b", "a", "b")]

    (expected,) = in_ranks(1, lambda _: action(DDP()))
    assert in_ranks(2, lambda _: action(FSDP(tensor=2))) == [pytest.approx(expected, rel=1e-5)] * 2


def test_state_is_restored_to_the_optimizer_of_its_parameter() -> None:
    def action(rank: int) -> Any:
        one, other = (Training(DDP(), Product, optimizer) for _ in range(2))
        take(one, "a", torch.ones(2))
        other.replica.load_state(saved(one.state()))
        for training in (one, other):
            take(training, "b", torch.ones(2))
            take(training, "a", torch.ones(2))
        return one.weights(), other.weights()

    ((one, other),) = in_ranks(1, action)
    assert one == other
    assert one["a"] != [1.0, 1.0]


def test_a_nonfinite_gradient_skips_one_update() -> None:
    def action(rank: int) -> Any:
        training = Training(DDP(), Product, optimizer)
        norms = [take(training, "a", torch.full((2,), math.nan if rank else 1.0)), take(training, "b", torch.ones(2))]
        return norms, training.weights()

    for norms, weights in in_ranks(2, action):
        assert math.isnan(norms[0])
        assert weights["a"] == [1.0, 1.0]
        assert weights["b"] == pytest.approx([0.0, 1.0])


def test_an_update_that_does_not_use_its_parameters_is_refused() -> None:
    class Half(Product):
        def forward(self, x: Tensor) -> Tensor:
            return self.a * x

    def action(rank: int) -> str:
        training = Training(FSDP(), lambda: nn.Sequential(Half()), optimizer)
        take(training, "a", torch.ones(2))
        try:
            take(training, "b", torch.ones(2, requires_grad=True))
        except Exception as error:
            return f"{error} {getattr(error, 'hints', '')}"
        return ""

    for said in in_ranks(2, action):
        assert "`0.b` got no gradient" in said
        assert "optimizer.updates.b.parameters" in said


@pytest.mark.parametrize("turn", ["a", "b"])
@pytest.mark.parametrize("build", [DDP, FSDP])
def test_a_failed_update_restores_the_replica(build: Callable[[], Strategy], turn: str) -> None:
    def action(rank: int) -> Any:
        replica = Training(build(), Product, optimizer).replica
        before = (replica.module, replica.optimizer, replica.gradients, replica.clip_norm)
        with suppress(ArithmeticError), replica.select_update(turn):
            assert replica.optimizer is not before[1]
            raise ArithmeticError
        after = (replica.module, replica.optimizer, replica.gradients, replica.clip_norm)
        same = all(one is other for one, other in zip(before, after, strict=True))
        return same and all(parameter.requires_grad for parameter in replica.unwrapped.parameters())

    assert in_ranks(2, action) == [True, True]


def test_weights_left_gathered_by_an_evaluation_are_frozen_in_an_update() -> None:
    """FSDP freezes a gathered weight when it is gathered; without resharding it would stay as it was."""

    def action(rank: int) -> Any:
        training = Training(
            FSDP(reshard_after_forward=False),
            lambda: nn.Sequential(Product()),
            optimizer,
            blocks=lambda model: [model[0]],
        )
        trained = []
        for turn in ("a", "b"):
            with torch.no_grad():
                training.model(torch.ones(2))
            with training.replica.select_update(turn):
                training.replica.module(torch.ones(2))
                product = training.replica.unwrapped[0]
                trained.append([name for name in ("a", "b") if getattr(product, name).requires_grad])
        return trained

    assert in_ranks(2, action) == [[["a"], ["b"]]] * 2


def test_weights_left_gathered_by_an_update_are_not_frozen_after_it() -> None:
    """Without resharding at its end, the weights of other updates would stay frozen in the gathered form."""

    def action(rank: int) -> Any:
        training = Training(
            FSDP(reshard_after_forward=False),
            lambda: nn.Sequential(Product()),
            optimizer,
            blocks=lambda model: [model[0]],
        )
        found = []
        for turn in ("a", "b"):
            with torch.no_grad(), training.replica.select_update(turn):
                training.replica.module(torch.ones(2))
            product = training.replica.unwrapped[0]
            found.append([type(parameter).__name__ for parameter in product.parameters()])
            training.model(torch.ones(2))
            found.append([name for name in ("a", "b") if getattr(product, name).requires_grad])
        return found

    assert in_ranks(2, action) == [[["DTensor"] * 2, ["a", "b"]] * 2] * 2
