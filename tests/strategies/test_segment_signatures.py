"""Signatures of pipeline stages: the planner recognizes identical stages with them."""

from collections.abc import Callable, Hashable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddpforge.strategies.pipeline.segments import declared_segments, segment_signatures


class Layer(nn.Module):
    def __init__(self, settings: Any, width: int = 8) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.settings = settings
        self.window: Any = 128

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)  # type: ignore[no-any-return]


class Layers(nn.Module):
    pipeline = ("layers",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(SimpleNamespace(causal=True)) for _ in range(6))


def of_six(change: Callable[[Layer], Any], styles: dict[str, str] | None = None) -> list[Hashable]:
    """Returns the signatures of six stages of one layer each, after `change` of the fourth layer."""
    model = Layers()
    change(model.layers[3])  # type: ignore[arg-type]
    return segment_signatures(model, [[step] for step in declared_segments(model)], styles or {})


def test_inner_stages_with_identical_layers_have_equal_signatures() -> None:
    first, *between, last = of_six(lambda layer: None)
    assert len(set(between)) == 1
    assert len({first, last, between[0]}) == 3


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda layer: setattr(layer, "window", 4096), id="a setting"),
        pytest.param(lambda layer: setattr(layer.settings, "causal", False), id="a setting of an object"),
        pytest.param(lambda layer: setattr(layer, "window", [1, 2]), id="a list"),
        pytest.param(lambda layer: setattr(layer, "window", torch.sin), id="a function"),
        pytest.param(lambda layer: setattr(layer, "window", object()), id="an object without equality"),
        pytest.param(lambda layer: setattr(layer, "linear", nn.Linear(8, 8, bias=False)), id="another layer"),
        pytest.param(lambda layer: setattr(layer, "linear", nn.Bilinear(8, 8, 8)), id="another class"),
        pytest.param(lambda layer: layer.linear.weight.requires_grad_(False), id="a frozen weight"),
        pytest.param(lambda layer: layer.double(), id="another dtype"),
        pytest.param(lambda layer: layer.register_forward_hook(lambda *_: None), id="a hook"),
        pytest.param(lambda layer: layer.eval(), id="evaluated"),
        pytest.param(lambda layer: layer.register_buffer("table", torch.zeros(3)), id="a buffer"),
    ],
)
def test_a_changed_stage_has_a_different_signature(change: Callable[[Layer], Any]) -> None:
    found = of_six(change)
    assert found[1] == found[2] == found[4]
    assert found[3] != found[4]


def test_a_stage_with_another_sharding_style_has_a_different_signature() -> None:
    found = of_six(lambda layer: None, {"layers.3.linear": "colwise", "layers.4.linear": "rowwise"})
    assert len(set(found)) == 5


def test_stages_that_share_a_weight_have_different_signatures() -> None:
    model = Layers()
    model.layers[2].linear.weight = model.layers[3].linear.weight  # type: ignore[union-attr]
    found = segment_signatures(model, [[step] for step in declared_segments(model)], {})
    assert found[1] == found[4]
    assert len(set(found)) == 5
