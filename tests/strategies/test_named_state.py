"""State of a model and its optimizer by parameter name; a state that does not fit is refused."""

from typing import Any

import pytest
import torch
from support.forked import refused
from support.saved_tensors import Saved
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState
from ddpforge.strategies import named_state


class Net(nn.Module):
    """Two trained weights, one of them with two names, a frozen weight, a persistent and a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(3))
        self.twin = self.a
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def trained(kind: type[Optimizer] = SGD, only: str = "ab", **options: Any) -> tuple[Net, Optimizer]:
    """Returns model and optimizer after a step with gradients of 2 for the weights in `only`; each has its own
    group."""
    net = Net()
    optimizer = kind([{"params": [net.b]}, {"params": [net.a]}], lr=0.5, **options)  # type: ignore[call-arg]
    for name in only:
        weight = net.get_parameter(name)
        weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    return net, optimizer


def state(**changes: Any) -> CanonicalState[Any]:
    """Returns a state that fits `Net`, of SGD with momentum."""
    model = {"a": [5.0, 6.0], "b": [7.0, 8.0, 9.0], "frozen": [4.0], "mean": [1.0, 2.0]}
    weights = {name: Saved(torch.tensor(values)) for name, values in model.items()}
    momenta = {name: {"momentum_buffer": Saved(torch.full((len(model[name]),), 3.0))} for name in "ab"}
    return CanonicalState(weights | changes.pop("model", {}), changes.pop("optimizer", momenta), {"twin": "a"})


def values(net: Net) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in net.state_dict().items()}


# ---------------------------------------------------------------------------------------------- capture
def test_each_weight_and_persistent_buffer_is_captured_once_under_its_first_name() -> None:
    net, optimizer = trained(momentum=0.9)
    optimizer.state["global"] = {"k": 3}  # type: ignore[index]
    found = named_state.capture(net, optimizer)
    assert {name: tensor.tolist() for name, tensor in found.model.items()} == {  # type: ignore[union-attr]
        "a": [0.0, 0.0],
        "b": [0.0, 0.0, 0.0],
        "frozen": [1.0],
        "mean": [0.0, 0.0],
    }
    assert found.aliases == {"twin": "a"}
    assert {name: entry["momentum_buffer"].tolist() for name, entry in found.optimizer.items()} == {  # type: ignore[union-attr]
        "a": [2.0, 2.0],
        "b": [2.0, 2.0, 2.0],
    }
    assert found.model["a"].data_ptr() == net.a.data_ptr()  # type: ignore[union-attr]
    assert not found.model["a"].requires_grad  # type: ignore[union-attr]


def test_a_weight_without_optimizer_state_is_skipped() -> None:
    net, optimizer = trained(AdamW, only="b")
    assert list(named_state.capture(net, optimizer).optimizer) == ["b"]
    optimizer.state[net.a] = {}
    assert list(named_state.capture(net, optimizer).optimizer) == ["b"]


def test_a_state_dict_value_that_is_not_a_tensor_is_refused() -> None:
    class Extra(Net):
        def get_extra_state(self) -> int:
            return 3

        def set_extra_state(self, state: Any) -> None: ...

    message = refused(CheckpointError, lambda: named_state.tensors(Extra()))
    assert message.startswith("`_extra_state` in the model's state_dict is a int, not a tensor")


# ---------------------------------------------------------------------------------------------- restore
def test_a_state_is_restored_in_place_and_keeps_hyperparameters() -> None:
    net, optimizer = trained(momentum=0.9)
    before = net.a.data_ptr()
    named_state.restore(net, optimizer, state())
    assert values(net) == {
        **{"a": [5.0, 6.0], "b": [7.0, 8.0, 9.0], "twin": [5.0, 6.0]},
        **{"frozen": [4.0], "mean": [1.0, 2.0]},
    }
    assert net.a.data_ptr() == before
    assert {name: optimizer.state[net.get_parameter(name)]["momentum_buffer"].tolist() for name in "ab"} == {
        "a": [3.0, 3.0],
        "b": [3.0, 3.0, 3.0],
    }
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_optimizer_state_of_any_type_and_shape_is_restored() -> None:
    net, optimizer = trained(momentum=0.9)
    kept = {"count": 3, "flag": None, "rows": Saved(torch.tensor([[1.0, 2.0]])), "loose": torch.tensor(4.0)}
    kept["half"] = Saved(torch.full((2,), 1.5, dtype=torch.float64))
    named_state.restore(net, optimizer, state(optimizer={"a": kept}))
    found = optimizer.state[net.a]
    assert (found["count"], found["flag"], found["rows"].tolist(), float(found["loose"])) == (3, None, [[1.0, 2.0]], 4)
    assert found["half"].tolist() == [1.5, 1.5]
    assert net.b not in optimizer.state  # it had no gradient at that time


def test_a_restored_optimizer_continues_identically() -> None:
    (first, one), (second, other) = trained(AdamW), trained(AdamW)
    captured = named_state.capture(first, one)
    saved = CanonicalState(
        {name: Saved(tensor.clone()) for name, tensor in captured.model.items()},  # type: ignore[union-attr]
        {
            name: {key: Saved(t.clone()) if t.ndim else t.clone() for key, t in entry.items()}  # type: ignore[union-attr]
            for name, entry in captured.optimizer.items()
        },
    )
    for optimizer in (one, other):
        optimizer.step()
    other.step()
    named_state.restore(second, other, saved)
    for net in (second,):
        for name in "ab":
            weight = net.get_parameter(name)
            weight.grad = torch.full_like(weight, 2.0)
    other.step()
    assert values(second) == values(first)


# ---------------------------------------------------------------------------------------------- mismatches
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            state(model={"more": Saved(torch.ones(1))}),
            "the checkpoint is of another model (not in the model: more)",
        ),
        (
            state(model={"a": Saved(torch.ones(3))}),
            "`a` is float32 [2] in the model and float32 [3] in the checkpoint",
        ),
        (
            state(model={"mean": Saved(torch.ones(2, dtype=torch.float64))}),
            "`mean` is float32 [2] in the model and float64 [2] in the checkpoint",
        ),
        (
            state(optimizer={"frozen": {"momentum_buffer": Saved(torch.ones(1))}}),
            "the checkpoint holds optimizer state of `frozen`, which is not trained here",
        ),
    ],
)
@pytest.mark.parametrize("partial", [False, True])
def test_a_state_of_another_model_is_refused(wrong: CanonicalState[Any], said: str, partial: bool) -> None:
    net, optimizer = trained(momentum=0.9)
    assert refused(CheckpointError, lambda: named_state.restore(net, optimizer, wrong, partial=partial)) == said


def test_missing_names_are_refused_unless_the_state_is_partial() -> None:
    net, optimizer = trained(momentum=0.9)
    less = CanonicalState({"b": Saved(torch.zeros(3))}, {})
    message = refused(CheckpointError, lambda: named_state.restore(net, optimizer, less))
    assert message == "the checkpoint is of another model (missing from the checkpoint: a, frozen, mean)"
    named_state.restore(net, optimizer, less, partial=True)
    assert values(net)["b"] == [0.0, 0.0, 0.0]
    assert values(net)["a"] == [0.0, 0.0]
    assert optimizer.state[net.a]["momentum_buffer"].tolist() == [2.0, 2.0]  # the state does not contain it


def test_a_state_without_optimizer_state_resets_the_optimizer() -> None:
    net, optimizer = trained(momentum=0.9)
    named_state.restore(net, optimizer, state(optimizer={}))
    assert not optimizer.state


@pytest.mark.parametrize(
    ("expected", "found", "partial", "said"),
    [
        ({"a"}, {"a"}, False, None),
        ({"a"}, set(), True, None),
        ({"a"}, set(), False, "missing from the checkpoint: a"),
        (set(), {"a"}, True, "not in the model: a"),
        (set("abcdef"), set(), False, "missing from the checkpoint: a, b, c, d, e …"),
        (set("abcde"), set(), False, "missing from the checkpoint: a, b, c, d, e"),
        (set(), set("abcdefgh"), True, "not in the model: a, b, c, d, e …"),
        ({"a", "b"}, {"b", "c"}, False, "missing from the checkpoint: a; not in the model: c"),
    ],
)
def test_different_names_are_listed(expected: set[str], found: set[str], partial: bool, said: str | None) -> None:
    if said is None:
        named_state.match(expected, found, partial=partial)
        return
    message = refused(CheckpointError, lambda: named_state.match(expected, found, partial=partial))
    assert message == f"the checkpoint is of another model ({said})"


def test_like_converts_each_loaded_state_tensor() -> None:
    """Calls `like` with the loaded tensor and its parameter."""
    net, optimizer = trained(momentum=0.9)
    made: list[tuple[list[float], int]] = []

    def like(mine: Tensor, parameter: Tensor) -> Tensor:
        made.append((mine.tolist(), parameter.data_ptr()))
        return mine

    named_state.restore(net, optimizer, state(), like=like)
    assert sorted(made) == sorted([([3.0, 3.0], net.a.data_ptr()), ([3.0, 3.0, 3.0], net.b.data_ptr())])
