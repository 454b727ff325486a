"""Alternating updates in a step: declaration, batches, metrics, parameters and optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from ddpforge.components.local_code import component_name
from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError
from ddpforge.features.alternating_updates import AlternatingUpdates
from ddpforge.interfaces import Task, Total
from ddpforge.recipe.schema import Component, UpdateComponent
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer, CompositeOptimizer, member_optimizers
from ddpforge.training.learning_rates import Rates
from ddpforge.training.parameter_groups import parameters_by_update
from ddpforge.training.updates import (
    batches_per_step,
    finish_metrics,
    tasks_by_update,
    update_names,
)


def turn(**settings: Any) -> UpdateComponent:
    return UpdateComponent.model_validate({"use": "sgd"} | settings)


class Duel(Task):
    updates = ("d", "g")

    def loss(self, model: nn.Module, batch: Any, turn: str = "") -> tuple[Tensor, Any]:
        return torch.tensor(2.0 if turn == "d" else 3.0), turn


class Recorder:
    """Stepper and replica in one, which record their calls; `norms` are the gradient norms."""

    def __init__(self, norms: Iterable[float] = (3.0, 4.0, 12.0)) -> None:
        self.seen: list[tuple[str, int, list[float]]] = []
        self.norms, self.now = iter(norms), ""

    @contextmanager
    def select_update(self, name: str) -> Iterator[None]:
        self.now = name
        yield
        self.now = "outside"

    def train_step(
        self, step: int, first: MicroBatch, micro_batches: Iterable[MicroBatch], *, measure: bool, update: int
    ) -> tuple[dict[str, Total], Tensor]:
        self.seen.append((self.now, update, [micro.data for micro in micro_batches]))
        return {"loss": Total(torch.tensor(6.0), 2)}, torch.tensor(next(self.norms))


def batches(number: int) -> Iterator[tuple[MicroBatch, Iterator[MicroBatch]]]:
    """Yields global batches 1, 2, … of two micro-batches each: n and n + 0.5."""
    for n in range(1, number + 1):
        two = [MicroBatch(n + half, 1, 2, bool(half), 0, 0) for half in (0.0, 0.5)]
        yield two[0], iter(two)


def run(turns: dict[str, UpdateComponent], norms: Iterable[float] = (3.0, 4.0, 12.0)) -> tuple[Recorder, Any]:
    noted = Recorder(norms)
    drawn = batches(batches_per_step(turns))
    several = AlternatingUpdates(noted, dict.fromkeys(turns, noted), turns, lambda: next(drawn))  # type: ignore[arg-type]
    return noted, several.train_step(1, *next(drawn), measure=True)


# ---------------------------------------------------------------------------------------------- updates and batches
def test_alternating_updates_share_the_batch_of_the_step() -> None:
    noted, (totals, norm) = run({"d": turn(), "g": turn()})
    assert noted.seen == [("d", 0, [1.0, 1.5]), ("g", 1, [1.0, 1.5])]
    assert norm.item() == 5.0  # of the whole step: 3 and 4 belong to different parameters
    assert sorted(totals) == ["grad_norm/d", "grad_norm/g", "loss/d", "loss/g"]


def test_an_update_with_new_batches_precedes_an_update_with_the_last_batch() -> None:
    noted, (totals, norm) = run({"d": turn(n_updates=2, new_batch=True), "g": turn()})
    assert noted.seen == [("d", 0, [1.0, 1.5]), ("d", 1, [2.0, 2.5]), ("g", 2, [2.0, 2.5])]
    assert (totals["loss/d"].sum, totals["loss/d"].count) == (12.0, 4)  # a mean over both updates
    assert totals["grad_norm/d"].sum.item() == pytest.approx((25 / 2) ** 0.5)
    assert norm.item() == pytest.approx((25 / 2 + 144) ** 0.5)


def test_a_nonfinite_gradient_marks_the_step_and_does_not_stop_other_updates() -> None:
    noted, (totals, norm) = run({"d": turn(n_updates=2), "g": turn()}, [torch.nan, 4.0, 12.0])
    assert len(noted.seen) == 3
    assert norm.isnan()
    assert totals["grad_norm/g"].sum == 12.0


@pytest.mark.parametrize(
    ("turns", "draws"),
    [
        ({}, 1),
        ({"d": turn(), "g": turn()}, 1),
        ({"d": turn(new_batch=True), "g": turn(new_batch=True)}, 2),
        ({"d": turn(n_updates=5, new_batch=True), "g": turn()}, 5),
        ({"d": turn(n_updates=5), "g": turn(new_batch=True)}, 2),
        ({"d": turn(n_updates=5, new_batch=True), "g": turn(n_updates=2, new_batch=True)}, 7),
    ],
)
def test_the_batches_of_a_step_follow_from_its_updates(turns: dict[str, UpdateComponent], draws: int) -> None:
    assert batches_per_step(turns) == draws


# ---------------------------------------------------------------------------------------------- the task
def test_each_update_has_a_task_with_its_loss() -> None:
    views = tasks_by_update(Duel())
    assert [(name, float(view.loss(nn.Identity(), None)[0])) for name, view in views.items()] == [
        ("d", 2.0),
        ("g", 3.0),
    ]
    assert views["d"].count(None) is None
    assert component_name(views["d"]) == "Duel"
    assert views["g"].finish({"loss": 1.0}) == {"loss/g": 1.0}


def test_a_task_without_alternating_updates_is_unchanged() -> None:
    class Plain(Task):
        def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
            raise NotImplementedError

    task = Plain()
    assert tasks_by_update(task) == {"": task}
    assert finish_metrics(task, {"loss": 1.0}) == {"loss": 1.0}


def test_the_loss_of_a_step_is_the_sum_over_its_updates() -> None:
    assert finish_metrics(Duel(), {"loss/d": 2.0, "loss/g": 3.0, "x/d": 1.0})["loss"] == 5.0


@pytest.mark.parametrize("names", ["dg", ("a/b",), (1,), ("",)])
def test_invalid_names_of_updates_are_refused(names: Any) -> None:
    task = Duel()
    task.updates = names
    with pytest.raises(PluginError, match="must be names of letters"):
        update_names(task)


# ---------------------------------------------------------------------------------------------- the parameters
class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.d, self.g, self.shared = nn.Linear(2, 1), nn.Linear(1, 2), nn.Linear(1, 1, bias=False)


@pytest.mark.parametrize(
    ("turns", "said"),
    [
        ({"d": ["d.*"], "g": ["g.*"]}, "parameter `shared.weight` is in no update; add it to"),
        ({"d": ["d.*", "s*"], "g": ["g.*", "shared.*"]}, "`shared.weight` is in the updates d and g"),
        ({"d": ["d.*"], "g": ["h.*"]}, "optimizer.updates.g.parameters: `h.*` matches no parameter; similar names:"),
    ],
)
def test_each_parameter_belongs_to_exactly_one_update(turns: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as found:
        parameters_by_update(Pair(), turns)
    assert said in str(found.value)


def test_parameters_of_updates_are_in_the_order_of_the_model() -> None:
    found = parameters_by_update(Pair(), {"g": ["shared.*", "g.*"], "d": ["d.*"]})
    assert found == {"g": ["g.weight", "g.bias", "shared.weight"], "d": ["d.weight", "d.bias"]}


def test_a_tied_parameter_in_two_updates_is_refused() -> None:
    pair = Pair()
    pair.g.weight = pair.d.bias  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"`d.bias` is in the updates d and g"):
        parameters_by_update(pair, {"d": ["d.*", "shared.*"], "g": ["g.*"]})


# ---------------------------------------------------------------------------------------------- the optimizers
def alternating() -> tuple[Pair, AlternatingOptimizer]:
    pair = Pair()
    inner = CompositeOptimizer({"": SGD(pair.g.parameters(), lr=0.5), "s": SGD(pair.shared.parameters(), lr=2.0)})
    return pair, AlternatingOptimizer({"d": AdamW(pair.d.parameters(), lr=0.1), "g": inner}, {"d": None, "g": 1.0})


def test_an_alternating_optimizer_steps_all_its_members() -> None:
    pair, optimizer = alternating()
    assert [name for name, _ in member_optimizers(optimizer)] == ["d", "g", "g/s"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 2.0]
    for parameter in pair.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = pair.shared.weight.detach().clone()
    optimizer.step()
    assert torch.equal(pair.shared.weight.detach(), before - 2.0)
    assert set(optimizer.state) == set(pair.d.parameters())


def test_an_update_may_have_a_separate_schedule() -> None:
    _, optimizer = alternating()
    rates = Rates(optimizer, {"": lambda step: 1.0, "g": lambda step: 1 / (step + 1)})
    rates.set(1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.25, 1.0]
    assert rates.named() == {"d": 0.1, "g": 0.25}
    rates.set(0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5, 2.0]


def test_one_optimizer_has_one_rate() -> None:
    optimizer = SGD(Pair().parameters(), lr=0.5)
    rates = Rates(optimizer, {"": lambda step: 0.5})
    rates.set(0)
    assert (optimizer.param_groups[0]["lr"], rates.named()) == (0.25, {})


def test_the_schedule_of_an_update_is_a_component() -> None:
    assert turn(schedule={"use": "cosine"}).schedule == Component(use="cosine")
