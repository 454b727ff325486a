"""Extra state of an optimizer: counters are saved and restored, other changes are refused."""

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


def test_counters_of_every_kind_are_restored() -> None:
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


def test_a_checkpoint_without_counters_resets_them() -> None:
    optimizer, own = stepped(Counting, 3)
    own.restore({})
    assert (optimizer.count, optimizer.param_groups[0]["d"], float(optimizer.factor)) == (0, 1.0, 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adafactor, torch.optim.NAdam])
def test_torch_optimizers_have_no_extra_state(kind: type[Optimizer]) -> None:
    _, own = stepped(kind, 3)
    assert own.capture() == {}


@pytest.mark.parametrize(("kind", "name"), [(Remembering, "attributes.rates.length"), (Noisy, "attributes.generator")])
def test_extra_state_that_is_not_a_number_is_refused(kind: type[Optimizer], name: str) -> None:
    _, own = stepped(kind, 2)
    with pytest.raises(CheckpointError, match=f"{kind.__name__} changes its `{name}`"):
        own.capture()


def test_hyperparameters_of_the_recipe_are_not_extra_state() -> None:
    optimizer, own = stepped(Common, 0)
    optimizer.param_groups[0]["lr"] = 5.0
    assert own.capture() == {}


def test_a_number_without_a_place_in_the_optimizer_is_refused() -> None:
    _, own = stepped(Common, 0)
    with pytest.raises(CheckpointError, match="has no place"):
        own.restore({"optimizer.groups.3.d": 1.0})


# ---------------------------------------------------------------------------------------------- changes
class Box:
    def __init__(self) -> None:
        self.n = 0


class Keeping(Optimizer):
    """Optimizer that only stores values, which tests change."""

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
        (lambda o: setattr(o, "number", 1), "attributes.number", 1),  # of a different type
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
def test_only_the_changed_number_is_saved(change: Callable[[Keeping], object], name: str, value: Any) -> None:
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
def test_unchanged_state_and_state_saved_elsewhere_are_skipped(change: Callable[[Keeping], object]) -> None:
    assert changed(change)[2] == {}


@pytest.mark.parametrize("number", [math.nan, torch.tensor(math.nan)])
def test_nan_that_stays_nan_is_unchanged(number: Any) -> None:
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
        (lambda o: setattr(o, "vector", torch.ones(2)), "attributes.vector"),  # a new tensor, though equal
        (lambda o: setattr(o, "vector", 3.0), None),  # a number
        (lambda o: setattr(o, "number", torch.ones(2)), "attributes.number"),
        (lambda o: o.complex.add_(1), "attributes.complex"),
        (lambda o: setattr(o, "dtype", torch.float64), "attributes.dtype"),
        (lambda o: o.items.append(1.0), "attributes.items.length"),
        (lambda o: delattr(o, "number"), "attributes.number"),
        (lambda o: o.items[1].pop("inner"), "attributes.items.1.inner"),
    ],
)
def test_a_change_that_is_not_a_number_is_refused(change: Callable[[Keeping], object], name: str | None) -> None:
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


def test_every_number_is_restored_even_if_a_new_optimizer_lacks_it() -> None:
    _, _, found = changed(all_numbers)
    fresh = Keeping()
    tensor = fresh.tensor
    own = OptimizerExtraState(fresh)
    own.restore(found | {"powersgd.step": 3})  # not state of the optimizer: ignored
    assert own.capture() == found
    assert (fresh.number, fresh.none, fresh.numpy, fresh.box.n) == (2.0, 3, 4.0, 5)
    assert fresh.tensor is tensor  # other objects may refer to it
    assert (float(tensor), fresh.items[0], fresh.items[1]["inner"]) == (6.0, 7.0, 8.0)
    assert (fresh.param_groups[0]["d"], fresh.state["global"], fresh.new) == (9.0, 10.0, 11.0)  # type: ignore[index, attr-defined]


def test_restore_resets_unsaved_numbers_and_removes_new_ones() -> None:
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


def test_a_number_under_a_key_that_is_not_a_string_is_restored() -> None:
    _, _, found = changed(lambda o: o.items[1].update({("a", 1): 7.0}))
    fresh = Keeping()
    OptimizerExtraState(fresh).restore(found)
    assert fresh.items[1] == {"lr": 2.0, "inner": 3.0, ("a", 1): 7.0}


def test_restore_refuses_a_list_that_has_grown() -> None:
    optimizer = Keeping()
    own = OptimizerExtraState(optimizer)
    optimizer.items.append(1.0)
    with pytest.raises(CheckpointError, match=r"`attributes.items.2`, but Keeping has no place"):
        own.restore({})


@pytest.mark.parametrize("name", ["grad_scaler", "found_inferior", "defaults_used"])
def test_attributes_with_names_similar_to_those_of_torch_are_saved(name: str) -> None:
    assert changed(lambda o: setattr(o, name, 3.0))[2] == {f"optimizer.attributes.{name}": 3.0}
