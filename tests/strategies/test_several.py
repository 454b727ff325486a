"""Several optimizers in one step, Muon for matrices and SGD for the rest: the same under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from forked import Training, in_ranks, saved
from torch import nn
from torch.optim import SGD

from ddpforge.builtin.optim.muon import muon
from ddpforge.interfaces import Strategy
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP
from ddpforge.strategies.several import Several


class Layers(nn.Module):
    """Matrices taller and wider than long, one whose rows ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(3, 8), nn.Linear(8, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x).tanh()).tanh()).square()
        return found


def optimizer(parameters: Any) -> Several:
    weights = list(parameters)
    matrices = [p for p in weights if p.ndim == 2]
    rest = [p for p in weights if p.ndim != 2]
    parts = {"": SGD(rest, lr=0.1, momentum=0.9), "matrices": muon([{"params": matrices}], lr=0.05)}
    return Several(parts)


def inputs(step: int) -> torch.Tensor:
    """The same on every rank, so that the mean of gradients is each rank's to the last bit: Muon rounds to bf16."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def whole(training: Training) -> dict[str, torch.Tensor]:
    """The weights, of which a rank may hold a part, put together over ranks."""
    found = {}
    for name, part in training.replica.weights.parts().items():
        mine = torch.zeros(part.shape).flatten()
        mine[part.region.start : part.region.stop] = part.tensor.flatten()
        found[name] = training.world.all.sum(mine) / part.replicas
    return found


def trained(build: Callable[[], Strategy]) -> Callable[[int], Any]:
    def action(rank: int) -> Any:
        training = Training(build(), Layers, optimizer, blocks=lambda model: [model.first])
        norms = [training.step(inputs(step)) for step in range(3)]
        state = training.state()
        kept = {name: sorted(entry) for name, entry in state.optimizer.items()}
        return norms, whole(training), kept

    return action


@pytest.mark.parametrize("build", [DDP, FSDP, lambda: FSDP(replicas=2)])
def test_muon_and_sgd_do_the_same_on_whole_and_on_sharded_matrices(build: Callable[[], Strategy]) -> None:
    ((norms, expected, kept),) = in_ranks(1, trained(DDP))
    for found, weights, state in in_ranks(2, trained(build)):
        assert found == pytest.approx(norms, rel=1e-6)
        assert state == kept
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name].flatten(), rtol=1e-6, atol=1e-7)
    assert set(kept) == set(expected)
    assert {tuple(keys) for keys in kept.values()} == {("momentum_buffer",)}


def test_a_matrix_moves_by_an_orthogonal_one() -> None:
    """Without weight decay and momentum the first update has singular values near one, however small the gradient."""
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 1e-3
    muon([{"params": [weight]}], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    values = torch.linalg.svdvals(weight.detach())
    assert 0.5 < values.min() <= values.max() < 1.5


def test_what_is_no_matrix_is_named() -> None:
    layer = nn.Linear(2, 2)
    groups = [{"params": list(layer.parameters()), "names": ["weight", "bias"]}]
    with pytest.raises(ValueError, match=r"`bias` has the shape \[2\]; choose them by"):
        muon(groups, lr=0.1)


def test_momentum_goes_on_where_it_stood_under_another_strategy() -> None:
    def action(rank: int) -> Any:
        one, other = (Training(build(), Layers, optimizer) for build in (DDP, FSDP))
        one.step(inputs(0))
        other.replica.load_state(saved(one.state()))
        for training in (one, other):
            training.step(inputs(1))
        return whole(one), whole(other)

    ((one, other),) = in_ranks(1, action)
    assert all(torch.equal(one[name], other[name]) for name in one)
