"""Parameters that are trained, and parameters with weight decay."""

import pytest
import torch
from torch import nn

from ddpforge.builtin.models.gpt import GPT
from ddpforge.training.parameter_groups import parameter_groups, parameters_by_group


class Net(nn.Module):
    """Model with an embedding tied to the output layer, norms, a bias, a scale and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.tokens = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.batch_norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.tokens.weight


TRAINABLE = [
    *("scale", "tokens.weight", "norm.weight", "norm.bias", "hidden.weight", "hidden.bias"),
    *("batch_norm.weight", "batch_norm.bias"),
]


def test_without_patterns_one_group_has_every_trainable_parameter_once() -> None:
    model = Net()
    (group,) = parameter_groups(model, [])
    assert group["names"] == TRAINABLE
    assert [id(p) for p in group["params"]] == [id(model.get_parameter(name)) for name in TRAINABLE]
    assert "weight_decay" not in group


@pytest.mark.parametrize(
    ("no_decay", "names"),
    [
        (["bias"], {"norm.bias", "hidden.bias", "batch_norm.bias"}),
        (["norm"], {"norm.weight", "norm.bias", "batch_norm.weight", "batch_norm.bias"}),
        (["embedding"], {"tokens.weight"}),
        (["1d"], set(TRAINABLE) - {"tokens.weight", "hidden.weight"}),
        (["hidden.*"], {"hidden.weight", "hidden.bias"}),
        (["head.weight"], {"tokens.weight"}),  # its other name
        (["scale", "bias"], {"scale", "norm.bias", "hidden.bias", "batch_norm.bias"}),
    ],
)
def test_patterns_select_parameters_without_decay(no_decay: list[str], names: set[str]) -> None:
    decayed, others = parameter_groups(Net(), no_decay)
    assert others["names"] == [name for name in TRAINABLE if name in names]
    assert decayed["names"] == [name for name in TRAINABLE if name not in names]
    assert others["weight_decay"] == 0.0
    assert "weight_decay" not in decayed


@pytest.mark.parametrize(
    "layer",
    [nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm3d(4), nn.InstanceNorm2d(4, affine=True), nn.SyncBatchNorm(4)],
)
def test_every_normalisation_layer_of_torch_is_a_norm(layer: nn.Module) -> None:
    (group,) = parameter_groups(layer, ["norm"])
    assert group["weight_decay"] == 0.0


def test_a_custom_norm_is_recognized_by_its_class_name() -> None:
    class LlamaRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    assert [group["weight_decay"] for group in parameter_groups(LlamaRMSNorm(), ["norm"])] == [0.0]


def test_biases_inside_attention_and_recurrent_layers_are_biases() -> None:
    attention, recurrent = nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)
    assert parameter_groups(attention, ["bias"])[1]["names"] == ["in_proj_bias", "out_proj.bias"]
    assert parameter_groups(recurrent, ["bias"])[1]["names"] == ["bias_ih_l0", "bias_hh_l0"]


def test_a_gpt_decays_its_matrices_only() -> None:
    model = GPT(layers=1, width=8, heads=2)
    decayed, others = parameter_groups(model, ["bias", "norm", "embedding"])
    assert decayed["names"] == [
        "blocks.0.attention.qkv.weight",
        "blocks.0.attention.projection.weight",
        "blocks.0.mlp.0.weight",
        "blocks.0.mlp.2.weight",
    ]
    assert len(decayed["names"]) + len(others["names"]) == len(list(model.parameters()))


def test_norms_and_biases_without_decay_stay_constant_with_zero_gradients() -> None:
    """LayerNorm of ones and zero gradients: one step of AdamW with learning rate 0.1 and decay 0.1."""
    for no_decay, expected in ((["norm"], 1.0), ([], 0.99)):
        layer = nn.LayerNorm(4)
        nn.init.ones_(layer.bias)
        optimizer = torch.optim.AdamW(parameter_groups(layer, no_decay), lr=0.1, weight_decay=0.1)
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        assert torch.cat(list(layer.parameters())).tolist() == pytest.approx([expected] * 8)


def test_names_survive_saving_and_loading_the_optimizer() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(parameter_groups(model, ["bias"]))
    other = torch.optim.AdamW(parameter_groups(model, ["bias"]))
    other.load_state_dict(optimizer.state_dict())
    assert [group["names"] for group in other.param_groups] == [
        group["names"] for group in parameter_groups(model, ["bias"])
    ]


def test_a_glob_may_match_frozen_parameters_only() -> None:
    (group,) = parameter_groups(Net(), ["frozen.*"])
    assert group["names"] == TRAINABLE


def test_a_glob_without_a_match_is_refused_with_similar_names() -> None:
    with pytest.raises(ValueError, match=r"`hiden.weight` matches no parameter; similar names: hidden.weight"):
        parameter_groups(Net(), ["hiden.weight"])
    with pytest.raises(ValueError, match="`norms` matches no parameter; similar names: norm"):
        parameter_groups(Net(), ["norms"])


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2).requires_grad_(False)])
def test_a_model_without_trainable_parameters_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="no trainable parameters"):
        parameter_groups(model, [])


# ---------------------------------------------------------------------------------------------- recipe groups
def chosen(groups: dict[str, list[str]]) -> dict[str, list[str]]:
    return parameters_by_group(Net(), groups)


def test_groups_contain_matching_parameters_and_the_first_group_has_the_rest() -> None:
    every = chosen({"all": ["*"]})["all"]
    found = chosen({"matrices": ["2d", "!embedding"], "norms": ["norm"]})
    flat = [name for names in found.values() for name in names]
    assert sorted(flat) == sorted(every)
    shapes = {name: parameter.ndim for name, parameter in Net().named_parameters()}
    assert found["matrices"]
    assert all(shapes[name] == 2 for name in found["matrices"])
    assert list(found) == ["", "matrices", "norms"]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"a": ["*"], "b": ["norm"]}, 'is in the groups a and b, but can be in only one; an entry "!GLOB"'),
        ({"a": ["nothing.*"]}, "optimizer.groups.a.parameters: `nothing.*` matches no parameter; similar names:"),
        ({"a": ["2d", "!2d"]}, "optimizer.groups.a.parameters: it has no trainable parameter"),
    ],
)
def test_invalid_groups_are_refused(groups: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ValueError, match="group") as found:
        chosen(groups)
    assert said in str(found.value)


def test_a_parameter_is_found_by_every_name_of_it_or_its_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = nn.Linear(2, 2, bias=False)
            self.a = self.b = nn.Parameter(torch.ones(2))

    for pattern, name in (("second.*", "first.weight"), ("b", "a")):
        decayed, others = parameter_groups(Twice(), [pattern])
        assert (others["names"], others["weight_decay"]) == ([name], 0.0)
        assert len(decayed["names"]) == 1
