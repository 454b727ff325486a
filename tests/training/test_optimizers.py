"""Optimizers built from the groups of a recipe, with separate settings or separate optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Muon

from ddpforge.components.registry import OBJECT, Registry
from ddpforge.recipe.schema import OptimizerComponent
from ddpforge.strategies.composite_optimizer import member_optimizers
from ddpforge.training.learning_rates import Rates
from ddpforge.training.optimizers import build_optimizer, check_parameters


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.norm, self.head = (
            nn.Embedding(5, 4),
            nn.Linear(4, 4),
            nn.LayerNorm(4),
            nn.Linear(4, 2),
        )


def built(no_decay: tuple[str, ...] = (), **groups: Any) -> Any:
    options = {"lr": 0.1, "weight_decay": 0.5}
    named = {
        name: {"use": "adamw", "parameters": at} | more | {"options": more.get("options", {}) | {}}
        for name, (at, more) in groups.items()
    }
    component = OptimizerComponent.model_validate(
        {"use": "adamw", "options": options, "no_decay": no_decay, "groups": named}
    )
    return build_optimizer(Registry.installed(), component, Net(), ())


def summary(optimizer: Any) -> list[tuple[str, list[str], float, float]]:
    return [(g["group"], g["names"], g["lr"], g["weight_decay"]) for g in optimizer.param_groups]


def test_a_group_has_separate_settings_and_the_rest_the_settings_of_the_optimizer() -> None:
    optimizer = built(("bias",), head=(("head.*",), {"options": {"lr": 0.7, "weight_decay": 0.25}}))
    assert type(optimizer) is AdamW
    assert summary(optimizer) == [
        ("", ["table.weight", "body.weight", "norm.weight"], 0.1, 0.5),
        ("", ["body.bias", "norm.bias"], 0.1, 0.0),
        ("head", ["head.weight"], 0.7, 0.25),
        ("head", ["head.bias"], 0.7, 0.0),
    ]


def test_an_optimizer_may_take_the_model() -> None:
    def doubled(params: list[dict[str, Any]], model: nn.Module, *, lr: float) -> SGD:
        return SGD(params, lr=lr * len(list(model.parameters())))

    use = f"{OBJECT}doubled"
    registry = Registry.installed().with_objects({("optimizer", use): doubled})
    component = OptimizerComponent.model_validate({"use": use, "options": {"lr": 0.5}})
    assert build_optimizer(registry, component, Net(), ()).param_groups[0]["lr"] == 0.5 * 7
    assert registry.takes("optimizer", component, "model")
    assert not registry.takes("optimizer", OptimizerComponent.model_validate({"use": "adamw"}), "model")


def test_a_group_may_have_another_optimizer() -> None:
    at = ("2d", "!embedding", "!head.*")
    optimizer = built(
        matrices=(at, {"use": "muon", "options": {"lr": 0.02}}), head=(("head.*",), {"options": {"lr": 1.0}})
    )
    found = dict(member_optimizers(optimizer))
    assert isinstance(found["matrices"], Muon)
    assert isinstance(found[""], AdamW)
    assert [group["names"] for group in found["matrices"].param_groups] == [["body.weight"]]
    assert [group["group"] for group in optimizer.param_groups] == ["", "head", "matrices"]
    rates = Rates(optimizer, {"": lambda step: 0.5})
    rates.set(0)
    assert rates.named() == {"head": 0.5, "matrices": 0.01}
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_one_group_with_all_parameters_gives_one_optimizer() -> None:
    assert type(built(all=(("*",), {"use": "sgd", "options": {"lr": 0.1}}))) is SGD


def test_a_group_with_the_common_rate_is_not_reported_separately() -> None:
    optimizer = built(head=(("head.*",), {"options": {"weight_decay": 0.0}}))
    assert Rates(optimizer, {"": lambda step: 1.0}).named() == {}


def test_muon_refuses_parameters_that_are_not_matrices() -> None:
    with pytest.raises(Exception, match=r"`norm.weight` has the shape \[4\]"):
        built(matrices=(("norm",), {"use": "muon", "options": {"lr": 0.02}}))


class Deep(nn.Module):
    """Three blocks of a linear layer and a norm, with parameters before them, and a norm and a head after them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.table = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(3))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 2)


def test_layer_decay_lowers_the_rate_per_block_from_output_to_input() -> None:
    component = OptimizerComponent(use="adamw", options={"lr": 0.8}, no_decay=("1d",), layer_decay=0.5)
    optimizer = build_optimizer(Registry.installed(), component, Deep(), ())
    rates = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    expected = {"scale": 0.05, "table.weight": 0.05}
    expected |= {
        f"blocks.{block}.{layer}.{kind}": 0.1 * 2**block
        for block in range(3)
        for layer in (0, 1)
        for kind in ("weight", "bias")
    }
    expected |= {f"{layer}.{kind}": 0.8 for layer in ("norm", "head") for kind in ("weight", "bias")}
    assert rates == pytest.approx(expected)
    assert {group["weight_decay"] for group in optimizer.param_groups if "1.weight" in str(group["names"])} == {0.0}
    assert "scale" not in optimizer.param_groups[0]
    assert optimizer.param_groups[0]["lr"] == 0.8  # the rate in the log


def test_layer_decay_applies_within_groups() -> None:
    """Rates of a group are scaled as all others; the log has the rate of its last layer."""
    matrices = {"use": "muon", "parameters": ("blocks.*.0.weight",), "options": {"lr": 0.04}}
    component = OptimizerComponent.model_validate(
        {"use": "sgd", "options": {"lr": 0.8}, "layer_decay": 0.5, "groups": {"matrices": matrices}}
    )
    optimizer = build_optimizer(Registry.installed(), component, Deep(), ())
    found = {
        group["names"][0]: group["lr"]
        for name, one in member_optimizers(optimizer)
        for group in one.param_groups
        if name
    }
    assert found == pytest.approx({"blocks.2.0.weight": 0.02, "blocks.1.0.weight": 0.01, "blocks.0.0.weight": 0.005})
    rates = Rates(optimizer, {"": lambda step: 1.0})
    assert rates.named() == pytest.approx({"matrices": 0.02})


def test_layer_decay_counts_frozen_layers() -> None:
    model = Deep()
    model.blocks[2].requires_grad_(False)
    component = OptimizerComponent(use="sgd", options={"lr": 1.0}, layer_decay=0.5)
    optimizer = build_optimizer(Registry.installed(), component, model, ())
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize(
    ("model", "turns", "said"),
    [(Net(), (), "name classes in train.blocks"), (Deep(), ("a", "b"), "does not work with updates")],
)
def test_layer_decay_is_refused_without_blocks_or_with_alternating_updates(
    model: nn.Module, turns: tuple[str, ...], said: str
) -> None:
    component = OptimizerComponent(use="sgd", options={"lr": 1.0}, layer_decay=0.5)
    with pytest.raises(ValueError, match=f"layer_decay .*{said}"):
        check_parameters(Registry.installed(), component, model, turns)
