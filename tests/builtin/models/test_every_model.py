"""Guarantees of every built-in model."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ddpforge.builtin.models.cnn import CNN
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.mlp import MLP

MODELS: list[tuple[Callable[[], nn.Module], Tensor]] = [
    (lambda: MLP(inputs=64, hidden=[32], outputs=10), torch.ones(2, 1, 8, 8)),
    (lambda: CNN(width=4), torch.ones(2, 1, 8, 8)),
    (lambda: GPT(layers=2, width=16, block_size=8), torch.ones(2, 8, dtype=torch.int64)),
]
every_model = pytest.mark.parametrize(("build", "inputs"), MODELS, ids=["mlp", "cnn", "gpt"])


@every_model
def test_one_seed_gives_the_same_initial_weights(build: Callable[[], nn.Module], inputs: Tensor) -> None:
    states = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        states.append(build().state_dict())
    first, same, other = states
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@every_model
def test_no_parameter_is_unused(build: Callable[[], nn.Module], inputs: Tensor) -> None:
    model = build()
    model(inputs).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


@every_model
def test_building_on_the_meta_device_allocates_nothing(build: Callable[[], nn.Module], inputs: Tensor) -> None:
    with torch.device("meta"):
        model = build()
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    assert model.state_dict().keys() == build().state_dict().keys()
