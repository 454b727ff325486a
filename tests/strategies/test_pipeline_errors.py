"""Mistakes under a pipeline are refused by name."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from support.forked import in_ranks, refused, set_up
from support.torch_versions import needs_pipelines
from torch import Tensor, nn
from torch.optim import SGD

from ddpforge.errors import StrategyError
from ddpforge.interfaces import Pass
from ddpforge.ranks.heartbeat import current
from ddpforge.strategies.pipeline import Pipeline
from ddpforge.strategies.pipeline.segments import Segment
from ddpforge.strategies.pipeline.stage import StageMicroBatch, StageModule, call_signature

pytestmark = needs_pipelines

_Loss = Callable[[Any, Tensor], Tensor]


class Chain(nn.Module):
    """Two layers and a scale. Options make the second step skip the scale, or use dropout."""

    pipeline: Any = ("first", ("leave", "second", "scale"))

    def __init__(self, *, uses_scale: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.ones(2))
        self.uses_scale, self.dropout = uses_scale, nn.Dropout(dropout)

    def leave(self, x: Tensor) -> Tensor:
        found: Tensor = self.dropout(self.second(x))
        return found * self.scale if self.uses_scale else found

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.first(x))


class Forgetful(Chain):
    """Chain whose last step uses the first layer without declaring it."""

    def leave(self, x: Tensor) -> Tensor:
        return super().leave(x) + self.first.weight.sum()


def total(model: Any, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).sum()
    return found


def step(model: nn.Module, loss: _Loss = total, schedule: Any = "1F1B", trains: bool = True, data: Any = "ddp") -> Any:
    """Runs a step of three passes and the update; returns the losses and the number of heartbeats."""
    strategy = Pipeline(schedule=schedule, data=data)
    set_up(strategy)
    held = strategy.wrap(model, ())
    replica: Any = strategy.prepare(held, SGD([p for p in held.parameters() if not p.is_meta], lr=0.1))

    def compute(module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
        one.seed()
        return loss(module, one.batch), None

    before = current().beats
    ones = [Pass(batch=torch.ones(2, 2), seed=lambda i=i: torch.manual_seed(i)) for i in range(3)]  # type: ignore[misc]
    with nullcontext() if trains else torch.no_grad():
        found = [
            None if each is None else each[0].item() for each in replica.run_microbatches(ones, compute, trains=trains)
        ]
    marks = current().beats - before
    if trains:
        replica.step()
    return found, marks


def error_of_last_rank(build: Callable[[], nn.Module], loss: _Loss = total, schedule: Any = "1F1B") -> str:
    """Returns the error of the last rank. The first rank waits for it in vain."""

    def action(rank: int) -> str:
        if rank:
            return refused(StrategyError, lambda: step(build(), loss, schedule))
        with suppress(RuntimeError, StrategyError):
            step(build(), loss, schedule)
        return ""

    return str(in_ranks(2, action)[1])


def twice(model: Any, batch: Tensor) -> Tensor:
    return total(model, batch) + total(model, batch)


def reads(model: Any, batch: Tensor) -> Tensor:
    return total(model, batch) * model.scale.sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (twice, "the task calls the model more than once for a batch"),
        (reads, "the task's loss uses `scale` of the model, but under a pipeline it can only call the model"),
        (lambda model, batch: batch.sum(), "the task's loss does not call the model"),
    ],
    ids=["twice", "reads", "never"],
)
def test_a_task_must_call_the_model_exactly_once(loss: _Loss, expected: str) -> None:
    assert expected in error_of_last_rank(Chain, loss)


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_a_weight_of_a_model_that_the_task_keeps_is_refused(data: str) -> None:
    def action(rank: int) -> str:
        model = Chain()

        def loss(given: Any, batch: Tensor) -> Tensor:
            return total(given, batch) * float(model.scale.detach().norm())

        if rank:
            return refused(StrategyError, lambda: step(model, loss, data=data))
        with suppress(RuntimeError, StrategyError):
            step(model, loss, data=data)
        return ""

    assert "`detach` uses parameter `scale` of the model while this rank may have only a part" in in_ranks(2, action)[1]


@pytest.mark.parametrize(("schedule", "data"), [("1F1B", "ddp"), ("ZBVZeroBubble", "ddp"), ("1F1B", "fsdp")])
def test_a_weight_without_a_gradient_is_refused(schedule: str, data: str) -> None:
    """Schedules that split backward passes skip weights that they do not find; FSDP gives them zeros."""

    def build() -> nn.Module:
        model = Chain(uses_scale=False)
        model.pipeline = ("first", "dropout", ("leave", "second", "scale"), "dropout")
        return model

    def action(rank: int) -> str:
        if rank:
            return refused(StrategyError, lambda: step(build(), total, schedule, data=data))
        with suppress(RuntimeError):
            step(build(), total, schedule, data=data)
        return ""

    assert "parameter `scale` got no gradient on rank 1" in in_ranks(2, action)[1]


def test_a_step_that_uses_an_undeclared_module_is_refused() -> None:
    assert "`leave` uses `first` of Forgetful, which is on another rank" in error_of_last_rank(Forgetful)


def test_a_stage_without_trained_parameters_is_refused() -> None:
    def build() -> nn.Module:
        model = Chain()
        model.first.requires_grad_(False)
        return model

    assert "rank 0 would have nothing to train" in error_of_last_rank(build)


@pytest.mark.parametrize("trains", [True, False])
def test_dropout_masks_follow_from_the_seed_and_ranks_have_equal_heartbeats(trains: bool) -> None:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return Chain(dropout=0.5)

    def action(rank: int) -> Any:
        return step(build(), trains=trains), step(build(), trains=trains)

    (first, again), (last, last_again) = in_ranks(2, action)
    assert first[0] == [None, None, None]
    assert last == last_again
    assert len(set(last[0])) > 1  # for equal batches
    assert first[1] == again[1] == last[1]


class Transposing(nn.Module):
    """Model that sends a transposed tensor, receives an expanded one, and changes a tensor in place."""

    pipeline = (("begin", "first"), ("flip", "middle"), ("view",), ("turn", "second"))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.second = (nn.Linear(2, 2) for _ in range(3))

    def begin(self, x: Tensor) -> Tensor:
        found: Tensor = self.first(x).T
        return found

    def flip(self, x: Tensor) -> Tensor:
        return self.view(self.middle(x).T)

    def view(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (2, 1)).squeeze(2)

    def turn(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(x.relu_()).T
        return found


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_tensors_with_any_strides_can_be_sent(schedule: str) -> None:
    def action(rank: int) -> Any:
        torch.manual_seed(7)
        return step(Transposing(), schedule=schedule)[0]

    torch.manual_seed(7)
    model = Transposing()
    expected = model.turn(model.view(model.flip(model.begin(torch.ones(2, 2))))).sum().item()
    assert in_ranks(2, action)[schedule == "1F1B"] == [pytest.approx(expected)] * 3


def test_parts_of_a_model_draw_different_dropout_masks_from_one_seed() -> None:
    """Also parts of one rank: with the same masks, the units of all layers would be dropped together."""

    def mask(number: int, seed: int) -> list[float]:
        steps = [Segment("dropout", nn.Dropout(0.5), ())]
        nothing: list[Any] = []
        cpu, directly = torch.device("cpu"), lambda take, *x: take(*x)
        part = StageModule(number, 4, steps, nothing, nothing, cpu, lambda: None, nullcontext, directly)
        x = torch.ones(1, 32)
        one = Pass(batch=None, seed=lambda: torch.default_generator.manual_seed(seed) and None)
        part.micros = [StageMicroBatch(one, ((x,), {}))]
        found: list[float] = part(*([x] if number else []), number=0).flatten().tolist()
        return found

    masks = [mask(number, 5) for number in range(3)]
    assert len({*map(tuple, masks)}) == 3
    assert mask(1, 5) == masks[1] != mask(1, 6)


@pytest.mark.parametrize("data", ["ddp", "fsdp"])
def test_gradients_of_two_pipelines_are_averaged_once(data: str) -> None:
    """Four ranks are two stages with two pipelines; each weight has three passes with the gradient of one process."""

    def action(rank: int) -> tuple[float, dict[str, float]]:
        torch.manual_seed(0)
        strategy = Pipeline(stages=2, data=data)  # type: ignore[arg-type]
        set_up(strategy)
        held = strategy.wrap(Chain(), ())
        replica: Any = strategy.prepare(held, SGD([p for p in held.parameters() if not p.is_meta], lr=0.1))
        # Pipelines see different inputs: of 1 and of 3, as much as 2 for both.
        ones = [Pass(batch=torch.full((2, 2), 1.0 + 2 * replica.world.dp_ranks.rank), seed=lambda: None)] * 3
        list(replica.run_microbatches(ones, lambda module, one: (total(module, one.batch), None), trains=True))
        norm = replica.step().item()
        shards = replica.weights.shards()
        return norm, {name: float(part.tensor.sum()) / (2 if data == "ddp" else 1) for name, part in shards.items()}

    torch.manual_seed(0)
    plain = Chain()
    (3 * total(plain, torch.full((2, 2), 2.0))).backward()
    norm = float(torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
    SGD(plain.parameters(), lr=0.1).step()
    found = in_ranks(4, action)
    assert [one for one, _ in found] == pytest.approx([norm] * 4, rel=1e-5)
    sums: dict[str, float] = {}
    for _, weights in found:
        for name, value in weights.items():
            sums[name] = sums.get(name, 0.0) + value
    assert sums == pytest.approx(
        {name: float(p.detach().sum()) for name, p in plain.named_parameters()}, rel=1e-5, abs=1e-6
    )


def test_inputs_of_another_shape_dtype_or_number_have_another_form() -> None:
    """Micro-batches of one form run together, so shapes of activations must follow from the form."""

    def form(batch: Any) -> Any:
        one = Pass(batch=batch, seed=lambda: None)
        return call_signature(one, lambda model, given: (model(*given.batch), None)).form

    x = torch.ones(2, 3)
    others = [(x[:1],), (x.double(),), (x, x), (x, 2), (x, 3), (x, None)]
    assert len({form((x,)), *map(form, others)}) == 1 + len(others)
    assert form((x,)) == form((x * 2,))
