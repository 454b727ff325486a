"""An optimizer's own counters are saved and restored; what else it changes is refused by name."""

import math
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.own_optimizers import Common, Counting, Noisy, Remembering
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.strategies.optimizer_extra_state import OptimizerExtraState


def stepped(kind: type[Optimizer], steps: int) -> tuple[Optimizer, OptimizerExtraState]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight])  # type: ignore[call-arg]
    own = OptimizerExtraState(optimizer)
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
    own.restore({})
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


# ---------------------------------------------------------------------------------------------- what counts as changed
class Box:
    def __init__(self) -> None:
        self.n = 0


class Keeping(Optimizer):
    """Does nothing but keep values, which tests change."""

    def __init__(self) -> None:
        super().__init__([torch.nn.Parameter(torch.ones(3))], {"lr": 0.1})
        self.number: Any = 1.0
        self.tensor: Any = torch.tensor(1.0)
        self.vector: Any = torch.ones(2)
        self.none: Any = None
        self.numpy: Any = np.float64(1.0)
        self.items: Any = [1.0, {"lr": 2.0, "inner": 3.0, ("a", 1): 4.0}]
        self.box = Box()
        self.complex = torch.tensor(1j)
        self.dtype: Any = torch.float32
        self.weight = self.param_groups[0]["params"][0]
        self.itself = self

    def step(self, closure: Any = None) -> None: ...


def changed(change: Callable[[Keeping], object]) -> tuple[Keeping, OptimizerExtraState, dict[str, Any]]:
    optimizer = Keeping()
    own = OptimizerExtraState(optimizer)
    change(optimizer)
    return optimizer, own, own.capture()


@pytest.mark.parametrize(
    ("change", "name", "value"),
    [
        (lambda o: setattr(o, "number", 2.0), "attributes.number", 2.0),
        (lambda o: setattr(o, "number", 1), "attributes.number", 1),  # of another type
        (lambda o: setattr(o, "number", True), "attributes.number", True),
        (lambda o: setattr(o, "number", math.nan), "attributes.number", math.nan),
        (lambda o: setattr(o, "number", None), "attributes.number", None),
        (lambda o: setattr(o, "number", torch.tensor(1.0)), "attributes.number", torch.tensor(1.0)),
        (lambda o: setattr(o, "tensor", 1.0), "attributes.tensor", 1.0),
        (lambda o: setattr(o, "tensor", torch.tensor(1)), "attributes.tensor", torch.tensor(1)),
        (lambda o: o.tensor.add_(1), "attributes.tensor", torch.tensor(2.0)),
        (lambda o: setattr(o, "none", 3), "attributes.none", 3),
        (lambda o: setattr(o, "numpy", np.float64(3.0)), "attributes.numpy", 3.0),
        (lambda o: setattr(o.box, "n", 4), "attributes.box.n", 4),
        (lambda o: o.items.__setitem__(0, 5.0), "attributes.items.0", 5.0),
        (lambda o: o.items[1].update(inner=6.0), "attributes.items.1.inner", 6.0),
        (lambda o: o.items[1].update({("a", 1): 7.0}), "attributes.items.1.2", 7.0),
        (lambda o: o.param_groups[0].update(d=8.0), "groups.0.d", 8.0),
        (lambda o: o.state.update({"global": 9.0}), "state.global", 9.0),
        (lambda o: setattr(o, "new", 10.0), "attributes.new", 10.0),
    ],
)
def test_one_number_that_changes_is_all_that_is_saved_of_it(
    change: Callable[[Keeping], object], name: str, value: Any
) -> None:
    _, _, found = changed(change)
    assert list(found) == [f"optimizer.{name}"]
    (one,) = found.values()
    assert type(one) is type(value)
    assert torch.as_tensor(math.inf if one is None else one).equal(
        torch.as_tensor(math.inf if value is None else value)
    ) or (math.isnan(one) and math.isnan(value))


@pytest.mark.parametrize(
    "change",
    [
        lambda o: None,
        lambda o: setattr(o, "number", 1.0),
        lambda o: setattr(o, "tensor", torch.tensor(1.0)),
        lambda o: o.items[1].update(lr=5.0),
        lambda o: o.param_groups[0].update(lr=5.0, initial_lr=5.0, names=["w"]),
        lambda o: o.weight.data.add_(1.0),  # saved with the model
        lambda o: o.state[o.weight].update(momentum=torch.ones(3)),
        lambda o: setattr(o, "hook", lambda: 3),  # code
        lambda o: setattr(o, "found_inf", torch.tensor(1.0)),
        lambda o: setattr(o, "_optimizer_step_pre_hooks_", 3),
        lambda o: setattr(o, "lock", threading.Lock()),
    ],
)
def test_what_does_not_change_or_is_saved_elsewhere_is_left_out(change: Callable[[Keeping], object]) -> None:
    assert changed(change)[2] == {}


@pytest.mark.parametrize("number", [math.nan, torch.tensor(math.nan)])
def test_what_is_not_a_number_and_stays_so_has_not_changed(number: Any) -> None:
    optimizer = Keeping()
    optimizer.number = number
    own = OptimizerExtraState(optimizer)
    assert own.capture() == {}
    optimizer.number = number * 0
    assert own.capture() == {}
    optimizer.number = 1.0 if isinstance(number, float) else torch.tensor(1.0)
    assert list(own.capture()) == ["optimizer.attributes.number"]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda o: o.vector.add_(1), "attributes.vector"),
        (lambda o: setattr(o, "vector", torch.ones(2)), "attributes.vector"),  # another, though equal
        (lambda o: setattr(o, "vector", 3.0), None),  # a number
        (lambda o: setattr(o, "number", torch.ones(2)), "attributes.number"),
        (lambda o: o.complex.add_(1), "attributes.complex"),
        (lambda o: setattr(o, "dtype", torch.float64), "attributes.dtype"),
        (lambda o: o.items.append(1.0), "attributes.items.length"),
        (lambda o: delattr(o, "number"), "attributes.number"),
        (lambda o: o.items[1].pop("inner"), "attributes.items.1.inner"),
    ],
)
def test_a_change_that_is_no_number_is_refused_by_name(change: Callable[[Keeping], object], name: str | None) -> None:
    if name is None:
        assert changed(change)[2] == {"optimizer.attributes.vector": 3.0}
        return
    with pytest.raises(CheckpointError, match=rf"Keeping changes its `{name}`, which is neither a number"):
        changed(change)


def all_numbers(o: Keeping) -> None:
    o.number, o.none, o.numpy, o.box.n = 2.0, 3, np.float64(4.0), 5
    o.tensor.fill_(6.0)
    o.items[0], o.items[1]["inner"] = 7.0, 8.0
    o.param_groups[0]["d"], o.state["global"], o.new = 9.0, 10.0, 11.0  # type: ignore[index, attr-defined]


def test_every_number_comes_back_in_its_place_also_those_that_a_new_optimizer_does_not_have() -> None:
    _, _, found = changed(all_numbers)
    fresh = Keeping()
    tensor = fresh.tensor
    own = OptimizerExtraState(fresh)
    own.restore(found | {"powersgd.step": 3})  # whose that is, is not the optimizer's concern
    assert own.capture() == found
    assert (fresh.number, fresh.none, fresh.numpy, fresh.box.n) == (2.0, 3, 4.0, 5)
    assert fresh.tensor is tensor  # somebody else may hold it too
    assert (float(tensor), fresh.items[0], fresh.items[1]["inner"]) == (6.0, 7.0, 8.0)
    assert (fresh.param_groups[0]["d"], fresh.state["global"], fresh.new) == (9.0, 10.0, 11.0)  # type: ignore[index, attr-defined]


def test_what_is_not_saved_becomes_what_it_was_and_what_was_not_there_goes() -> None:
    optimizer, own, found = changed(all_numbers)
    own.restore({"optimizer.attributes.none": 3})
    assert own.capture() == {"optimizer.attributes.none": 3}
    assert "d" not in optimizer.param_groups[0]
    assert "global" not in optimizer.state
    assert not hasattr(optimizer, "new")
    assert (optimizer.number, float(optimizer.tensor), optimizer.items[0]) == (1.0, 1.0, 1.0)
    own.restore(found)
    own.restore({})
    assert own.capture() == {}


def test_a_number_under_a_key_that_is_no_name_comes_back_under_that_key() -> None:
    _, _, found = changed(lambda o: o.items[1].update({("a", 1): 7.0}))
    fresh = Keeping()
    OptimizerExtraState(fresh).restore(found)
    assert fresh.items[1] == {"lr": 2.0, "inner": 3.0, ("a", 1): 7.0}


def test_a_list_that_has_grown_is_not_shortened_in_silence() -> None:
    optimizer = Keeping()
    own = OptimizerExtraState(optimizer)
    optimizer.items.append(1.0)
    with pytest.raises(CheckpointError, match=r"`attributes.items.2`, but Keeping has no place"):
        own.restore({})


@pytest.mark.parametrize("name", ["grad_scaler", "found_inferior", "defaults_used"])
def test_attributes_whose_names_begin_as_torchs_are_state(name: str) -> None:
    assert changed(lambda o: setattr(o, name, 3.0))[2] == {f"optimizer.attributes.{name}": 3.0}
