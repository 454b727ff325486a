"""Probe of an optimizer on small weights, which leaves it unchanged; checks for sparse gradients."""

from typing import Any

import pytest
import torch
from support.forked import refused
from support.own_optimizers import Counting
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from ddpforge.errors import StrategyError
from ddpforge.strategies.optimizer_probe import check_sparse_gradients, probe_optimizer


def ones(value: float) -> Tensor:
    return torch.full((2,), value)


def test_each_weight_starts_with_its_first_value_and_receives_the_others_as_gradients() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = SGD([weight], lr=3.0, momentum=0.5)
    starts = [ones(1.0), ones(5.0)]
    weights, state = probe_optimizer(
        optimizer, optimizer.param_groups[0], [starts[0], ones(1.0), ones(2.0)], [starts[1], ones(4.0), ones(0.0)]
    )
    # Rate 0.1; momenta 1 and 2.5, and 4 and 2.
    assert [each.tolist() for each in weights] == [[pytest.approx(0.65)] * 2, [pytest.approx(4.4)] * 2]
    assert state["momentum_buffer"].tolist() == [2.5, 2.5]
    assert not any(each.requires_grad for each in weights)
    assert [start.tolist() for start in starts] == [[1.0, 1.0], [5.0, 5.0]]
    assert (weight.tolist(), len(optimizer.state), optimizer.param_groups[0]["lr"]) == ([1.0] * 5, 0, 3.0)
    assert optimizer.param_groups[0]["params"] == [weight]


def test_the_probe_uses_the_options_of_the_group() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = SGD([{"params": [first]}, {"params": [second], "weight_decay": 1.0}], lr=1.0)
    updated = [probe_optimizer(optimizer, group, [ones(1.0), ones(1.0)])[0][0] for group in optimizer.param_groups]
    assert [each[0].item() for each in updated] == [pytest.approx(0.9), pytest.approx(0.8)]


def test_counters_of_the_optimizer_are_unchanged_even_if_the_probe_fails() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Counting([weight])
    group = optimizer.param_groups[0]
    probe_optimizer(optimizer, group, [ones(1.0), ones(1.0), ones(1.0)])
    assert (optimizer.count, float(optimizer.factor), optimizer.seen) == (0, 1.0, {})

    class Failing(Counting):
        def step(self, closure: Any = None) -> None:
            super().step()
            raise RuntimeError("no")

    failing = Failing([weight])
    with pytest.raises(RuntimeError, match="no"):
        probe_optimizer(failing, failing.param_groups[0], [ones(1.0), ones(1.0)])
    assert (failing.count, float(failing.factor), failing.seen) == (0, 1.0, {})


class Prefilled(Optimizer):
    """Optimizer whose constructor creates a sum of squares per weight, as torch's Adagrad did before torch 2.12."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros_like(weight)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] += weight.grad.to_dense() ** 2


def test_an_optimizer_that_needs_state_from_its_constructor_is_refused() -> None:
    optimizer = Prefilled([nn.Parameter(torch.ones(2))])
    with pytest.raises(StrategyError) as caught:
        probe_optimizer(optimizer, optimizer.param_groups[0], [ones(1.0), ones(1.0)])
    assert caught.value.message.startswith("Prefilled needs state that its constructor makes for each weight")
    assert 'or set strategy.use = "ddp"' in caught.value.hints


# ---------------------------------------------------------------------------------------------- sparse gradients
class WithEmbedding(nn.Module):
    """Embedding of class `kind`, and a linear layer."""

    def __init__(self, kind: type[nn.Embedding | nn.EmbeddingBag] = nn.Embedding, *, sparse: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.table = kind(4, 2, sparse=sparse)


class Pure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(4, 2, sparse=True)


def message(model: nn.Module, optimizer: Optimizer, *, sharded: bool = False) -> str:
    return refused(StrategyError, lambda: check_sparse_gradients(optimizer, model, sharded=sharded))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda weights: AdamW(weights), "does not take them: "),
        (lambda weights: Adam(weights), "does not take them: "),
        (
            lambda weights: SGD(weights, momentum=0.9),
            "keeps its `momentum_buffer` sparse, which no",
        ),
        (lambda weights: SGD(weights, lr=0.1, fused=True), "does not take them: "),
    ],
)
def test_an_optimizer_without_support_for_sparse_gradients_is_refused(kind: Any, build: Any, reason: str) -> None:
    model = WithEmbedding(kind)
    said = message(model, build(model.parameters()))
    assert said.startswith(f"`table` ({kind.__name__}) gives sparse gradients, but ")
    assert reason in said
    assert "remove `sparse = True` from the embedding" in said


@pytest.mark.parametrize("build", [lambda w: SGD(w, lr=0.1), lambda w: Adagrad(w), lambda w: Prefilled(w)])
def test_an_optimizer_that_supports_sparse_gradients_is_accepted(build: Any) -> None:
    model = WithEmbedding()
    check_sparse_gradients(build(model.parameters()), model, sharded=False)


def test_dense_and_frozen_embeddings_are_accepted() -> None:
    frozen = WithEmbedding()
    frozen.table.weight.requires_grad_(False)
    for model in (WithEmbedding(sparse=False), frozen):
        for sharded in (False, True):
            check_sparse_gradients(AdamW(model.parameters()), model, sharded=sharded)


def test_sparse_gradients_are_refused_if_gradients_are_sharded() -> None:
    model = WithEmbedding()
    said = message(model, SGD(model.parameters(), lr=0.1), sharded=True)
    assert said.startswith("`table` (Embedding) gives sparse gradients, but sharded gradients are dense")


@pytest.mark.parametrize(("table", "other", "fits"), [(0.0, 0.9, True), (0.9, 0.0, False)])
def test_the_options_of_the_embeddings_group_decide(table: float, other: float, fits: bool) -> None:
    model = WithEmbedding()
    groups = [
        {"params": model.linear.parameters(), "momentum": other},
        {"params": model.table.parameters(), "momentum": table},
    ]
    optimizer = SGD(groups, lr=0.1)
    if fits:
        check_sparse_gradients(optimizer, model, sharded=False)
    else:
        assert "keeps its `momentum_buffer` sparse" in message(model, optimizer)


def test_sparse_adam_refuses_dense_gradients() -> None:
    pure = Pure()
    check_sparse_gradients(SparseAdam(pure.parameters()), pure, sharded=False)

    model = WithEmbedding()
    said = message(model, SparseAdam(model.parameters()))
    assert said.startswith("SparseAdam takes sparse gradients only, but the gradient of `linear.weight` is dense")
    model.linear.requires_grad_(False)
    check_sparse_gradients(SparseAdam([model.table.weight]), model, sharded=False)
