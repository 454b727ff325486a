"""Several optimizers in one step, Muon for matrices and SGD for other weights: the same under every strategy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.forked import Training, in_ranks, saved
from support.own_optimizers import Counting
from support.trained import trained as runs
from torch import nn
from torch.optim import SGD
from torch.utils._pytree import tree_map_only

from ddpforge.builtin.optim import sharded_muon
from ddpforge.builtin.optim.muon import muon
from ddpforge.builtin.optim.optimizers import adamw, sgd
from ddpforge.interfaces import Strategy, TensorShard
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer, CompositeOptimizer
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp import FSDP


class Layers(nn.Module):
    """Taller and wider matrices, one of them with a number of rows that ranks cannot share equally."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = nn.Linear(3, 8), nn.Linear(8, 5), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.third(self.second(self.first(x).tanh()).tanh()).square()
        return found


def optimizer(parameters: Any) -> CompositeOptimizer:
    weights = list(parameters)
    matrices = [p for p in weights if p.ndim == 2]
    rest = [p for p in weights if p.ndim != 2]
    parts = {"": SGD(rest, lr=0.1, momentum=0.9), "matrices": muon([{"params": matrices}], lr=0.05)}
    return CompositeOptimizer(parts)


def inputs(step: int) -> torch.Tensor:
    """Returns inputs equal on every rank, so that the mean of gradients is bit-identical: Muon rounds to bf16."""
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(step))


def whole(training: Training) -> dict[str, torch.Tensor]:
    """Returns the full weights, gathered over ranks."""
    found = {}
    for name, part in training.replica.weights.shards().items():
        mine = torch.zeros(part.shape).flatten()
        mine[part.region.start : part.region.stop] = part.tensor.flatten()
        found[name] = training.world.global_ranks.all_reduce_sum(mine) / part.replicas
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
def test_muon_and_sgd_have_the_same_results_on_whole_and_sharded_matrices(build: Callable[[], Strategy]) -> None:
    ((norms, expected, kept),) = in_ranks(1, trained(DDP))
    for found, weights, state in in_ranks(2, trained(build)):
        assert found == pytest.approx(norms, rel=1e-6)
        assert state == kept
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name].flatten(), rtol=1e-6, atol=1e-7)
    assert set(kept) == set(expected)
    assert {tuple(keys) for keys in kept.values()} == {("momentum_buffer",)}


class Stack(nn.Module):
    """Seven matrices, some with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [3, 24, 24, 24, 24, 6, 2, 1]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square()


def steps_of_muon(build: Callable[[], Strategy], make: Callable[..., Any]) -> Callable[[int], Any]:
    """Returns the weights after three steps, and how many matrices this rank orthogonalized for sharded weights."""

    def parts(parameters: Any) -> CompositeOptimizer:
        weights = list(parameters)
        matrices, rest = ([p for p in weights if (p.ndim == 2) == is_matrix] for is_matrix in (True, False))
        return CompositeOptimizer({"": SGD(rest, lr=0.1), "matrices": make([{"params": matrices}], lr=0.05)})

    def action(rank: int) -> Any:
        training = Training(build(), Stack, parts, blocks=lambda model: list(model.layers))
        with mock.patch.object(sharded_muon, "_orthogonalized", wraps=sharded_muon._orthogonalized) as counted:
            for step in range(3):
                training.step(inputs(step))
        return {name: weight.flatten() for name, weight in whole(training).items()}, counted.call_count

    return action


@pytest.mark.parametrize("options", [{}, {"nesterov": False, "adjust_lr_fn": "match_rms_adamw"}])
@pytest.mark.parametrize(
    ("build", "counts"),
    [(FSDP, [12, 9]), (lambda: FSDP(replicas=2), [6, 6, 6, 3])],  # of seven matrices in each of three steps
)
def test_each_matrix_is_orthogonalized_by_one_rank_with_the_bits_of_torch(
    build: Callable[[], Strategy], counts: list[int], options: dict[str, Any]
) -> None:
    ours = {name.removesuffix("_fn"): value for name, value in options.items()}
    ((expected, _),) = in_ranks(1, steps_of_muon(DDP, partial(torch.optim.Muon, **options)))

    found = in_ranks(len(counts), steps_of_muon(build, partial(muon, **ours)))

    assert sorted((count for _, count in found), reverse=True) == counts
    for weights, _ in found:
        assert {name for name in expected if not torch.equal(weights[name], expected[name])} == set()


def test_muon_updates_a_matrix_by_a_nearly_orthogonal_matrix() -> None:
    """Without weight decay and momentum the first update has singular values near one, for gradients of any size."""
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)) * 1e-3
    muon([{"params": [weight]}], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    values = torch.linalg.svdvals(weight.detach())
    assert 0.5 < values.min() <= values.max() < 1.5


def test_muon_refuses_parameters_that_are_not_matrices() -> None:
    layer = nn.Linear(2, 2)
    groups = [{"params": list(layer.parameters()), "names": ["weight", "bias"]}]
    with pytest.raises(ValueError, match=r"`bias` has the shape \[2\]; select the matrices with"):
        muon(groups, lr=0.1)


def test_momentum_continues_under_another_strategy() -> None:
    def action(rank: int) -> Any:
        one, other = (Training(build(), Layers, optimizer) for build in (DDP, FSDP))
        one.step(inputs(0))
        other.replica.load_state(saved(one.state()))
        for training in (one, other):
            training.step(inputs(1))
        return whole(one), whole(other)

    ((one, other),) = in_ranks(1, action)
    assert all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------- resume and rollback
KINDS: dict[str, Callable[[list[Any]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: adamw([{"params": weights}], lr=0.1),
    "sgd": lambda weights: sgd([{"params": weights}], lr=0.1, momentum=0.9),
    "sgd without momentum": lambda weights: sgd([{"params": weights}], lr=0.1),
    "muon": lambda weights: muon([{"params": weights}], lr=0.1),
    "RMSprop": lambda weights: torch.optim.RMSprop(weights, lr=0.01),
    "ASGD": lambda weights: torch.optim.ASGD(weights, lr=0.1),
    "Adagrad": lambda weights: torch.optim.Adagrad(weights, lr=0.1),
    "with counters of its own": Counting,
}
SHARDED = ("adamw", "sgd", "muon", "RMSprop")
NAMES = [("", "last"), ("", "state.a"), ("groups", "groups.0"), ("a", "a:groups.b"), ("last", "")]


def pairs(kinds: Sequence[str]) -> list[tuple[str, str, tuple[str, str]]]:
    both = list(product(kinds, repeat=2))
    return [(one, other, NAMES[number % len(NAMES)]) for number, (one, other) in enumerate(both)]


def resumes(build: Callable[[], Strategy], one: str, other: str, names: tuple[str, str], *, turns: bool) -> bool:
    """Returns True if a resumed run and a rollback after two of three steps have the weights of the straight run."""

    def both(weights: Any) -> CompositeOptimizer:
        trained = list(weights)
        matrices, rest = [[p for p in trained if (p.ndim == 2) is square] for square in (True, False)]
        first, second = (matrices, rest) if other != "muon" else (rest, matrices)
        parts = {names[0]: KINDS[one](first), names[1]: KINDS[other](second)}
        return AlternatingOptimizer(parts, dict.fromkeys(names)) if turns else CompositeOptimizer(parts)

    def step(training: Training, number: int) -> None:
        for name in names if turns else [None]:
            with training.replica.select_update(name) if name is not None else nullcontext():
                training.model = training.replica.module
                training.step(inputs(number))

    straight, again = (Training(build(), Layers, both, blocks=lambda model: [model.first]) for _ in range(2))
    for number in range(2):
        step(straight, number)
    kept = collected(straight)
    step(again, 7)
    again.replica.load_state(saved(kept))  # has different state before, as in a fresh process or before a rollback
    step(straight, 2)
    step(again, 2)
    expected = straight.weights()
    straight.replica.load_state(saved(kept))
    step(straight, 2)
    return again.weights() == expected == straight.weights()


def collected(training: Training) -> Any:
    """Returns a copy of the full state, gathered over ranks."""
    state = training.state()

    def full(value: Any) -> Any:
        if not isinstance(value, TensorShard):
            return value
        mine = torch.zeros(value.shape).flatten()
        mine[value.region.start : value.region.stop] = value.tensor.flatten()
        return (training.world.global_ranks.all_reduce_sum(mine) / value.replicas).view(value.shape)

    model = {name: full(value) for name, value in state.model.items()}
    optimizer = {name: {key: full(value) for key, value in entry.items()} for name, entry in state.optimizer.items()}
    return replace(state, model=copied(model), optimizer=copied(optimizer), extra_state=copied(state.extra_state))


def copied(state: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), dict(state))


@pytest.mark.parametrize(
    ("build", "ranks", "kinds", "turns"),
    [
        pytest.param(DDP, 1, tuple(KINDS), False, id="ddp, groups"),
        pytest.param(FSDP, 2, SHARDED, False, id="fsdp, groups"),
        pytest.param(DDP, 1, ("adamw", "sgd", "with counters of its own"), True, id="ddp, updates"),
        pytest.param(FSDP, 2, SHARDED, True, id="fsdp, updates", marks=pytest.mark.full),
    ],
)
def test_every_pair_of_optimizers_resumes_and_rolls_back(
    build: Callable[[], Strategy], ranks: int, kinds: Sequence[str], turns: bool
) -> None:
    tried = [pair for pair in pairs(kinds) if pair[:2] != ("muon", "muon")]  # there are no matrices for both

    def action(rank: int) -> list[Any]:
        return [pair for pair in tried if not resumes(build, *pair, turns=turns)]

    assert in_ranks(ranks, action, timeout=120) == [[]] * ranks


RECIPE = """
recipe = 2
name = "run"
model = {{ use = "mlp", inputs = 4, outputs = 1, hidden = [8] }}
data.train = {{ use = "./parts.py:{points}", samples = 24 }}
task = {{ use = "regression" }}
strategy = {{ use = "{strategy}" }}
train = {{ length = "{length}st", global_batch = 8, device = "cpu"{train} }}
checkpoint = {{ every = "2st" }}
track.every = "1st"
[optimizer]
use = "adamw"
lr = 0.01
groups.last = {{ use = "sgd", lr = 0.1, momentum = 0.9, parameters = ["*bias"] }}
"""


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_run_with_a_separate_optimizer_for_a_group_resumes(tmp_path: Path, strategy: str) -> None:
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    recipe = partial(RECIPE.format, points="Points", train="", strategy=strategy)
    straight = runs(tmp_path / "whole", recipe(length=5), 2)[0].column()
    first, rest = (runs(tmp_path / "parts", recipe(length=length), 2)[0].column() for length in (2, 5))
    assert len(rest) == 3
    assert first + rest == straight


def test_a_run_with_a_separate_optimizer_for_a_group_rolls_back(tmp_path: Path) -> None:
    recipe = RECIPE.format(points="SpoiltPoints", train=', on_nonfinite = "rollback"', strategy="ddp", length=9)
    (found, *_) = runs(tmp_path, recipe, 2)
    finite = [math.isfinite(loss) for loss in found.column()]
    assert not all(finite)
    assert sum(finite) >= 6
