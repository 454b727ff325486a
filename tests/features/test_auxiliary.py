"""Auxiliary modules of a task: declaration, following the model, checkpoints. One process."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.doubles import Plain
from support.forked import train
from support.saved_tensors import Saved
from torch import Tensor, nn

from ddpforge.errors import CheckpointError, PluginError, StrategyError, UsageError
from ddpforge.features.auxiliary import AuxiliaryModules, PlacedAuxiliary, declared, place
from ddpforge.interfaces import AuxiliaryModule, Replica, StepInfo, Strategy, Task, TensorShard, Weights
from ddpforge.strategies.single import Single


class Declares(Task):
    """Task that declares `modules(model)` as its auxiliary modules."""

    def __init__(self, modules: Callable[[nn.Module], Mapping[str, Any]]) -> None:
        self.modules = modules

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        return self.modules(model)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        return model(batch).sum(), None


def net() -> nn.Sequential:
    """Returns a linear layer with weight 1 and bias 2, followed by BatchNorm over one feature."""
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[0].bias.fill_(2.0)
    return model


def step(number: int) -> StepInfo:
    return StepInfo(step=number, samples=0, lr=0.0, seconds=0.0)


def placed(
    model: nn.Module, beside: AuxiliaryModule, *, begins: bool = True, strategy: Strategy | None = None
) -> PlacedAuxiliary:
    replica = Plain().holding(model, torch.optim.SGD(model.parameters()))
    strategy = strategy or Single()
    strategy.setup(train(), replica.world)
    found = declared(Declares(lambda _: {"other": beside}), model)
    return place(found, strategy, replica, replica.world, begins=begins)["task.other"]


def numbers(module: nn.Module) -> list[float]:
    return [tensor.item() for tensor in module.parameters()]


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state as a checkpoint would load it."""
    tensors = {name: x.tensor if isinstance(x, TensorShard) else x for name, x in state.items()}
    return {name: Saved(x.clone()) if isinstance(x, Tensor) else x for name, x in tensors.items()}


# ---------------------------------------------------------------------------------------------- declaration
def test_auxiliary_modules_are_frozen_and_in_evaluation_mode_unless_training_is_set() -> None:
    modules = {"one": AuxiliaryModule(module=net()), "two": AuxiliaryModule(module=net(), training=True)}
    found = declared(Declares(lambda _: modules), net())
    assert [(name, one.module.training) for name, one in found.items()] == [("one", False), ("two", True)]
    assert not any(p.requires_grad for one in found.values() for p in one.module.parameters())


@pytest.mark.parametrize(
    ("modules", "error", "complaint"),
    [
        (lambda model: {"it": net()}, PluginError, r"`it` of Declares.auxiliary_modules is a Sequential"),
        (lambda model: {"a/b": AuxiliaryModule(module=net())}, PluginError, "is not a plain name"),
        (
            lambda model: {"it": AuxiliaryModule(module=model)},
            PluginError,
            "its `0.weight` is the same parameter as `0.weight` of the model",
        ),
        (
            lambda model: {"it": AuxiliaryModule(module=net(), momentum=0.9)},
            PluginError,
            "a momentum, but follows no module",
        ),
        (
            lambda model: {"it": AuxiliaryModule(module=net(), weights="x", follows="")},
            PluginError,
            "both `follows` and `weights`",
        ),
        (
            lambda model: {"it": AuxiliaryModule(module=net(), follows="", momentum=1.5)},
            PluginError,
            "the momentum 1.5",
        ),
        (
            lambda model: {"it": AuxiliaryModule(module=net(), follows="", momentum=0.9, saved=False)},
            PluginError,
            "a resumed run would restart it with",
        ),
        (
            lambda model: {"it": AuxiliaryModule(module=net(), follows="trunk")},
            UsageError,
            "follows `trunk`, which the model",
        ),
        (
            lambda model: {"it": AuxiliaryModule(module=nn.Linear(2, 1), follows="0")},
            UsageError,
            r"`weight` is torch.float32 \(",
        ),
        (lambda model: {"it": AuxiliaryModule(module=nn.Linear(1, 1), follows="")}, UsageError, "is not there"),
        (lambda model: {"it": AuxiliaryModule(module=net().double(), follows="")}, UsageError, "is torch.float64"),
    ],
)
def test_invalid_declarations_are_refused(
    modules: Callable[[nn.Module], Mapping[str, Any]], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=complaint):
        declared(Declares(modules), net())


# ---------------------------------------------------------------------------------------------- following
def test_a_following_module_starts_as_a_copy_and_moves_with_its_momentum() -> None:
    model, other = net(), nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    beside = placed(model, AuxiliaryModule(module=other, follows="", momentum=lambda step: (0.75, 0.0)[step]))
    assert numbers(other) == [1.0, 2.0, 1.0, 0.0]
    with torch.no_grad():
        model[0].weight.fill_(5.0)
        model[1].running_mean.fill_(3.0)
    beside.on_step(step(1))
    assert numbers(other)[0] == 2.0  # 0.75 * 1 + 0.25 * 5
    assert other[1].running_mean.item() == 3.0  # changed by forward passes of the model
    beside.on_step(step(2))
    assert numbers(other)[0] == 5.0


def test_a_module_without_momentum_stays_a_copy_of_the_initial_submodule() -> None:
    model = net()
    beside = placed(model, AuxiliaryModule(module=(other := nn.Linear(1, 1)), follows="0"))
    with torch.no_grad():
        model[0].weight.fill_(5.0)
    beside.on_step(step(1))
    assert numbers(other) == [1.0, 2.0]


def test_a_module_without_parameters_can_follow() -> None:
    model = nn.Sequential(nn.BatchNorm1d(1, affine=False), nn.Linear(1, 1))
    beside = placed(
        model, AuxiliaryModule(module=(other := nn.BatchNorm1d(1, affine=False)), follows="0", momentum=0.9)
    )
    model[0].running_mean.fill_(3.0)  # type: ignore[operator, union-attr]
    beside.on_step(step(1))
    assert [buffer.item() for name, buffer in other.named_buffers() if name == "running_mean"] == [3.0]


def test_a_training_module_keeps_its_own_statistics_and_switches_mode_for_evaluation() -> None:
    model = net()
    beside = placed(model, AuxiliaryModule(module=(other := net()), follows="", momentum=0.5, training=True))
    other[1].running_mean.fill_(7.0)
    beside.on_step(step(1))
    assert other[1].running_mean.item() == 7.0
    with beside.evaluating():
        assert not other.training
    assert other.training
    assert {
        name
        for name, _ in nn.ModuleList([model, *AuxiliaryModules({"other": beside}).stateful_modules()]).named_buffers()
    } >= {
        "0.1.running_mean",
        "1.1.running_mean",
    }


def test_following_is_refused_if_the_strategy_shards_the_modules_differently() -> None:
    class Halves(Weights):
        def shards(self) -> Mapping[str, TensorShard]:
            return {}

        def frozen(self) -> Mapping[str, TensorShard]:
            return {}

        def elements(self, name: str, region: Any) -> Tensor:
            raise ValueError("only a half of it is here")

    class Apart(Single):
        def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Replica:
            raise NotImplementedError

    model = net()
    replica = Plain().holding(model, torch.optim.SGD(model.parameters()))
    replica.weights = Halves()
    strategy = Apart()
    strategy.setup(train(), replica.world)
    found = declared(Declares(lambda model: {"other": AuxiliaryModule(module=copy.deepcopy(model), follows="")}), model)
    with pytest.raises(
        StrategyError, match=r"`other` cannot follow the model: this strategy shards the two.*only a half"
    ):
        place(found, strategy, replica, replica.world, begins=True)


# ---------------------------------------------------------------------------------------------- checkpoints
def test_a_resumed_module_continues_with_its_saved_weights() -> None:
    model = net()
    first = placed(model, AuxiliaryModule(module=net(), follows="", momentum=0.5))
    with torch.no_grad():
        first.module[0].weight.fill_(9.0)  # type: ignore[index]
    state = saved(first.state())
    again = placed(net(), AuxiliaryModule(module=(other := net()), follows="", momentum=0.5), begins=False)
    again.load_state(state)
    assert numbers(other)[0] == 9.0
    with pytest.raises(CheckpointError, match=r"another model \(missing from the checkpoint: 0.bias"):
        again.load_state({name: x for name, x in state.items() if name != "0.bias"})


@pytest.fixture
def weights(tmp_path: Path) -> Callable[..., str]:
    def write(value: float, **more: Tensor) -> str:
        tensors = {name: torch.full_like(x, value) for name, x in net().state_dict().items()}
        save_file(tensors | more, tmp_path / "teacher.safetensors")
        return str(tmp_path / "teacher.safetensors")

    return write


def test_weights_from_a_file_are_read_at_every_start_and_not_saved(weights: Callable[..., str]) -> None:
    teacher = placed(net(), AuxiliaryModule(module=(one := net()), weights=weights(3.0)))
    assert numbers(one) == [3.0] * 4
    state = saved(teacher.state())
    assert state == {"magnitude": 21.0, "squares": 63.0}  # of seven tensors with one element
    placed(net(), AuxiliaryModule(module=net(), weights=weights(3.0)), begins=False).load_state(state)
    with pytest.raises(CheckpointError, match="auxiliary module `other` differ from those at the start of this run"):
        placed(net(), AuxiliaryModule(module=net(), weights=weights(3.001)), begins=False).load_state(state)


def test_saved_weights_from_a_file_are_read_once(weights: Callable[..., str]) -> None:
    teacher = placed(net(), AuxiliaryModule(module=net(), weights=weights(3.0), saved=True))
    again = placed(net(), AuxiliaryModule(module=(other := net()), weights="gone", saved=True), begins=False)
    again.load_state(saved(teacher.state()))
    assert numbers(other) == [3.0] * 4


def test_weights_from_a_file_must_match_the_module(weights: Callable[..., str]) -> None:
    file = weights(3.0)
    with pytest.raises(UsageError, match=r"weights of other = .*: it lacks 2.bias, 2.weight"):
        placed(net(), AuxiliaryModule(module=nn.Sequential(*net(), nn.Linear(1, 1)), weights=file))
    with pytest.raises(UsageError, match=r"`0.weight` is \[1, 2\] in the model and \[1, 1\] in weights of other"):
        placed(net(), AuxiliaryModule(module=nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), weights=file))


def test_statistics_updated_in_training_are_saved_even_if_weights_come_from_a_file(tmp_path: Path) -> None:
    """Reading `weights` again would reset the statistics."""
    save_file(net().state_dict(), tmp_path / "net.safetensors")
    given: dict[str, Any] = {"weights": str(tmp_path / "net.safetensors"), "training": True}
    beside = placed(net(), AuxiliaryModule(module=(module := net()), **given))
    module(torch.tensor([[3.0], [5.0]]))
    mean = module[1].running_mean.item()
    assert mean != 0.0
    again = placed(net(), AuxiliaryModule(module=(other := net()), **given), begins=False)
    again.load_state(saved(beside.state()))
    assert other[1].running_mean.item() == mean

    assert not AuxiliaryModule(module=nn.Linear(1, 1), **given).is_saved  # no buffer or parameter of it changes
    with pytest.raises(PluginError, match="updates statistics in training mode, and a resumed run would lose them"):
        declared(Declares(lambda _: {"it": AuxiliaryModule(module=net(), saved=False, **given)}), net())
