"""Materialization of a model on meta: memory and the usual initial weights, one module at a time."""

import pytest
import torch
from support.forked import refused
from torch import Tensor, nn

from ddpforge.errors import StrategyError
from ddpforge.strategies.fsdp.wrap_units import materialise


class Own(nn.Module):
    """Module with a weight, a frozen weight and buffers. `reset_parameters` skips the weight `forgets`."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets
        self.weight = nn.Parameter(torch.empty(3))
        self.frozen = nn.Parameter(torch.empty(2, dtype=torch.int64), requires_grad=False)
        self.register_buffer("mean", torch.empty(2))
        self.register_buffer("count", torch.empty((), dtype=torch.int64))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            if self.forgets == "one":
                self.weight[:2].uniform_()
            elif self.forgets != "weight":
                self.weight.uniform_()
            self.get_buffer("mean").zero_()


def build(*, twice: bool = False) -> nn.Sequential:
    first, inner = nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    return nn.Sequential(first, inner, Own(), *([inner] if twice else []))


@pytest.mark.parametrize("twice", [False, True])
def test_the_weights_equal_those_of_a_model_built_with_memory(twice: bool) -> None:
    torch.manual_seed(3)
    plain = build(twice=twice)
    with torch.device("meta"):
        model = build(twice=twice)
    torch.manual_seed(3)
    materialise(model, then={})
    for (name, one), other in zip(plain.named_parameters(), model.parameters(), strict=True):
        if name != "2.frozen":
            assert torch.equal(one, other), name
    assert torch.equal(model[1][1].running_var, torch.ones(3))
    assert model[2].frozen.tolist() == [0, 0]
    assert model[2].count.item() == 0
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}


def test_the_callback_of_a_module_runs_once_it_is_complete_and_before_later_modules() -> None:
    with torch.device("meta"):
        model = build(twice=True)
    seen: list[tuple[str, int]] = []

    def note(name: str, module: nn.Module) -> None:
        assert not any(tensor.is_meta for tensor in (*module.parameters(), *module.buffers()))
        seen.append((name, sum(parameter.is_meta for parameter in model.parameters())))

    materialise(
        model,
        then={
            id(model[1]): lambda module: note("inner", module),
            id(model[1][0]): lambda module: note("first of inner", module),
            id(model): lambda module: note("model", module),
        },
    )
    assert seen == [("first of inner", 4), ("inner", 2), ("model", 0)]


def test_a_module_with_two_parents_is_complete_once() -> None:
    with torch.device("meta"):
        shared = nn.Linear(2, 2)
        model = nn.ModuleList([nn.Sequential(shared, nn.Linear(2, 1)), nn.Sequential(nn.Linear(2, 2), shared)])
    seen: list[str] = []
    materialise(
        model,
        then={id(shared): lambda _: seen.append("shared"), id(model[1]): lambda _: seen.append("second parent")},
    )
    assert seen == ["shared", "second parent"]


def test_modules_with_memory_are_unchanged() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    before = model[0].weight.clone()
    materialise(model, then={})
    assert torch.equal(model[0].weight, before)
    assert not model[1].weight.is_meta


class Above(nn.Module):
    """Module with a weight, above a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.empty(2)), nn.Linear(2, 2)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 0.5)


def test_reset_parameters_of_a_module_does_not_replace_those_of_its_children() -> None:
    with torch.device("meta"):
        model = Above()
    torch.manual_seed(3)
    materialise(model, then={})
    torch.manual_seed(3)
    plain = nn.Linear(2, 2)
    assert model.scale.tolist() == [0.5, 0.5]
    assert torch.equal(model.inner.weight, plain.weight)
    assert torch.equal(model.inner.bias, plain.bias)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2))


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.reset_parameters: Tensor | None = None


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (Weighed, "`the model` (Weighed) has parameters or buffers but no reset_parameters"),
        (
            lambda: nn.Sequential(nn.Linear(1, 1), nn.Sequential(Buffered())),
            "`1.0` (Buffered) has parameters or buffers but no reset_parameters",
        ),
        (lambda: nn.Sequential(Own("weight")), "reset_parameters of `0` (Own) does not initialise `weight`"),
        (lambda: nn.Sequential(Own("one")), "reset_parameters of `0` (Own) does not initialise `weight`"),
    ],
)
def test_a_layer_without_complete_reset_parameters_is_refused(build: type[nn.Module], said: str) -> None:
    with torch.device("meta"):
        model = build()
    assert refused(StrategyError, lambda: materialise(model, then={})).startswith(said)
