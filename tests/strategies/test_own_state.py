"""An optimizer's own counters are saved and restored; what else it changes is refused by name."""

import pytest
import torch
from own_optimizers import Common, Counting, Noisy, Remembering
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.strategies.own_state import OwnState


def stepped(kind: type[Optimizer], steps: int) -> tuple[Optimizer, OwnState]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight])  # type: ignore[call-arg]
    own = OwnState(optimizer)
    for _ in range(steps):
        weight.grad = torch.ones(3)
        optimizer.step()
    return optimizer, own


def test_counters_of_every_kind_come_back() -> None:
    _, own = stepped(Counting, 3)
    saved = own.capture()
    assert {name: pytest.approx(float(value or 0)) for name, value in saved.items()} == {
        "optimizer.groups.0.d": 0.95**3,
        "optimizer.attributes.count": 3,
        "optimizer.attributes.factor": 0.9**3,
        "optimizer.attributes.seen.steps": 3,
        "optimizer.state.global.k": 6,
    }

    fresh, there = stepped(Counting, 0)
    there.restore(saved)
    assert there.capture() == saved
    assert (fresh.count, fresh.state["global"], fresh.seen) == (3, {"k": 6}, {"steps": 3})  # type: ignore[attr-defined, comparison-overlap]


def test_a_checkpoint_without_counters_gives_those_of_a_new_optimizer() -> None:
    optimizer, own = stepped(Counting, 3)
    own.reset()
    assert (optimizer.count, optimizer.param_groups[0]["d"], float(optimizer.factor)) == (0, 1.0, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.NAdam])
def test_torchs_optimizers_keep_nothing_of_their_own(kind: type[Optimizer]) -> None:
    _, own = stepped(kind, 3)
    assert own.capture() == {}


@pytest.mark.parametrize(("kind", "name"), [(Remembering, "attributes.rates.length"), (Noisy, "attributes.generator")])
def test_what_no_checkpoint_can_hold_is_refused_by_name(kind: type[Optimizer], name: str) -> None:
    _, own = stepped(kind, 2)
    with pytest.raises(CheckpointError, match=f"{kind.__name__} changes its `{name}`"):
        own.capture()


def test_hyper_parameters_that_the_recipe_decides_are_not_state() -> None:
    optimizer, own = stepped(Common, 0)
    optimizer.param_groups[0]["lr"] = 5.0
    assert own.capture() == {}


def test_a_number_that_there_is_no_place_for_is_refused() -> None:
    _, own = stepped(Common, 0)
    with pytest.raises(CheckpointError, match="has no place"):
        own.restore({"optimizer.groups.3.d": 1.0})
