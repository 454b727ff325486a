"""An optimizer is tried out on small weights, which leaves the optimizer as it was; sparse gradients are for few."""

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


def test_each_weight_begins_with_its_first_value_and_gets_the_others_as_gradients() -> None:
    weight = nn.Parameter(torch.ones(5))
    optimizer = SGD([weight], lr=3.0, momentum=0.5)
    starts = [ones(1.0), ones(5.0)]
    weights, state = probe_optimizer(
        optimizer, optimizer.param_groups[0], [starts[0], ones(1.0), ones(2.0)], [starts[1], ones(4.0), ones(0.0)]
    )
    # A rate of 0.1; momenta of 1 and 2.5, of 4 and 2.
    assert [each.tolist() for each in weights] == [[pytest.approx(0.65)] * 2, [pytest.approx(4.4)] * 2]
    assert state["momentum_buffer"].tolist() == [2.5, 2.5]
    assert not any(each.requires_grad for each in weights)
    assert [start.tolist() for start in starts] == [[1.0, 1.0], [5.0, 5.0]]
    assert (weight.tolist(), len(optimizer.state), optimizer.param_groups[0]["lr"]) == ([1.0] * 5, 0, 3.0)
    assert optimizer.param_groups[0]["params"] == [weight]


def test_the_options_are_those_of_the_group() -> None:
    first, second = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizer = SGD([{"params": [first]}, {"params": [second], "weight_decay": 1.0}], lr=1.0)
    updated = [probe_optimizer(optimizer, group, [ones(1.0), ones(1.0)])[0][0] for group in optimizer.param_groups]
    assert [each[0].item() for each in updated] == [pytest.approx(0.9), pytest.approx(0.8)]


def test_the_optimizers_own_counters_stay_as_they_are_also_where_it_fails() -> None:
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
    """Keeps a sum of squares of each weight from its constructor on, as torch's Adagrad did before torch 2.12."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, {"lr": 0.1})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros_like(weight)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] += weight.grad.to_dense() ** 2


def test_one_that_needs_what_its_constructor_keeps_is_refused_by_name() -> None:
    optimizer = Prefilled([nn.Parameter(torch.ones(2))])
    with pytest.raises(StrategyError) as caught:
        probe_optimizer(optimizer, optimizer.param_groups[0], [ones(1.0), ones(1.0)])
    assert caught.value.message.startswith("Prefilled needs state that its constructor makes for each weight")
    assert 'or set strategy.use = "ddp"' in caught.value.hints


# ---------------------------------------------------------------------------------------------- sparse gradients
class Looks(nn.Module):
    """An embedding, which may be of another class, and a linear layer."""

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
def test_an_optimizer_that_cannot_take_or_save_sparse_gradients_is_refused(kind: Any, build: Any, reason: str) -> None:
    model = Looks(kind)
    said = message(model, build(model.parameters()))
    assert said.startswith(f"`table` ({kind.__name__}) gives sparse gradients, but ")
    assert reason in said
    assert "remove `sparse = True` from the embedding" in said


@pytest.mark.parametrize("build", [lambda w: SGD(w, lr=0.1), lambda w: Adagrad(w), lambda w: Prefilled(w)])
def test_one_that_can_will_do(build: Any) -> None:
    model = Looks()
    check_sparse_gradients(build(model.parameters()), model, sharded=False)


def test_dense_and_frozen_embeddings_are_like_any_layer() -> None:
    frozen = Looks()
    frozen.table.weight.requires_grad_(False)
    for model in (Looks(sparse=False), frozen):
        for sharded in (False, True):
            check_sparse_gradients(AdamW(model.parameters()), model, sharded=sharded)


def test_where_gradients_are_sharded_nothing_takes_sparse_ones() -> None:
    model = Looks()
    said = message(model, SGD(model.parameters(), lr=0.1), sharded=True)
    assert said.startswith("`table` (Embedding) gives sparse gradients, but sharded gradients are dense")


@pytest.mark.parametrize(("table", "other", "fits"), [(0.0, 0.9, True), (0.9, 0.0, False)])
def test_the_embeddings_own_group_decides(table: float, other: float, fits: bool) -> None:
    model = Looks()
    groups = [
        {"params": model.linear.parameters(), "momentum": other},
        {"params": model.table.parameters(), "momentum": table},
    ]
    optimizer = SGD(groups, lr=0.1)
    if fits:
        check_sparse_gradients(optimizer, model, sharded=False)
    else:
        assert "keeps its `momentum_buffer` sparse" in message(model, optimizer)


def test_sparse_adam_takes_nothing_else() -> None:
    pure = Pure()
    check_sparse_gradients(SparseAdam(pure.parameters()), pure, sharded=False)

    model = Looks()
    said = message(model, SparseAdam(model.parameters()))
    assert said.startswith("SparseAdam takes sparse gradients only, but the gradient of `linear.weight` is dense")
    model.linear.requires_grad_(False)
    check_sparse_gradients(SparseAdam([model.table.weight]), model, sharded=False)
