"""`train.frozen_dtype`: memory of frozen weights shrinks, and results stay those of float32."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.doubles import Plain
from support.launched import Ranks
from support.saved_tensors import Saved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddpforge.builtin.models.frozen_layers import frozen_linear
from ddpforge.errors import CheckpointError
from ddpforge.features.frozen_dtype import FrozenDtype, cast_weights
from ddpforge.features.frozen_weights import convert_frozen
from ddpforge.interfaces import CanonicalState, TensorShard
from ddpforge.training.contract import ParameterCount, count_parameters
from ddpforge.training.parameter_groups import freeze

SMALL: dict[FrozenDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Words(nn.Module):
    """Embedding, norms and linear layers, with a convolution and a raw parameter; `head` is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.shift = nn.Parameter(torch.randn(16))
        self.mix = nn.Conv1d(16, 16, 1)
        self.norms = nn.ModuleList([nn.LayerNorm(16), nn.RMSNorm(16)])
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16, bias=False)])
        self.head = nn.Linear(16, 11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.head.weight[:1].sum() * 1e-2 + self.embed(ids) + self.shift
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + layer(norm(x)).relu()
        return self.head(x)  # type: ignore[no-any-return]


def words(dtype: torch.dtype | None = None) -> Any:
    """Returns the model with `head` trained; its values are those of `dtype`."""
    torch.manual_seed(0)
    model = Words()
    if dtype:
        model.to(dtype).float()
    freeze(model, ["*", "!head.*"])
    return model


def step(model: Any, *, autocast: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns logits and gradients; those of `head` also depend on the gradients of all layers' inputs."""
    ids = torch.arange(22).view(2, 11) % 11
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        logits = model(ids)
    logits.float().square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_results_are_bitwise_those_of_the_same_values_in_float32(dtype: FrozenDtype, autocast: bool) -> None:
    large, small = words(SMALL[dtype]), words(SMALL[dtype])
    cast_weights(small, dtype)
    assert small.layers[0].weight.dtype == SMALL[dtype]
    (logits, gradients), (found, own) = step(large, autocast=autocast), step(small, autocast=autocast)
    assert torch.equal(found, logits)
    assert gradients.keys() == own.keys() == {"head.weight", "head.bias"}
    assert all(torch.equal(own[name], value) and value.any() for name, value in gradients.items())


def test_weights_that_no_layer_converts_and_trained_ones_are_float32() -> None:
    model = words()
    cast_weights(model, "bf16")
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in dtypes.items() if dtype == torch.float32} == {
        "shift",
        "mix.weight",
        "mix.bias",
        "head.weight",
        "head.bias",
    }
    assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
    elements = 11 * 16 + 2 * 16 + 16 + 2 * 16 * 16 + 16
    assert count_parameters(model) == ParameterCount(
        all=elements + 16 + 16 * 17 + 11 * 17,
        trainable=11 * 17,
        frozen={"fp32": 16 + 16 * 17, "bf16": elements},
        frozen_bytes=2 * elements + 4 * (16 + 16 * 17),
    )


def test_autograd_keeps_no_copy_of_a_weight_in_float32() -> None:
    model = nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 64), nn.Linear(64, 2))
    freeze(model, ["1.*"])
    cast_weights(model, "bf16")
    kept: list[Tensor] = []

    def note(x: Tensor) -> Tensor:
        kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        model(torch.randn(2, 3))
    assert [x.dtype for x in kept if x.shape == (64, 64)] == [torch.bfloat16]


def test_a_copy_of_the_model_uses_its_own_weights() -> None:
    model = words()
    cast_weights(model, "bf16")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.layers[0].weight.zero_()
    assert not torch.equal(step(other)[0], step(model)[0])


def tied() -> Any:
    model: Any = nn.Module()
    model.embed, model.head = nn.Embedding(4, 4), nn.Linear(4, 4)
    model.head.weight = model.embed.weight
    return model


def loaded() -> Any:
    """Returns a model whose weights were loaded in bfloat16."""
    model = words().to(torch.bfloat16)
    model.register_buffer("scale", torch.ones(2, dtype=torch.bfloat16))
    model.keeps_saved_dtype = True
    return model


def test_saved_dtypes_stay_for_frozen_weights_only() -> None:
    model = loaded()
    cast_weights(model, None)
    assert model.embed.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == model.scale.dtype == torch.float32
    cast_weights(model := loaded(), "fp32")
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32}


def test_without_the_option_other_models_do_not_change() -> None:
    """Training of a bfloat16 weight is refused later."""
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.bfloat16), nn.Linear(2, 2))
    freeze(model, ["0.bias"])
    cast_weights(model, None)
    assert model[0].weight.dtype == torch.bfloat16


def test_ties_stay_and_a_trained_tie_is_float32() -> None:
    model = tied()
    freeze(model, ["head.bias"])
    cast_weights(model, "bf16")
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype == model.head.bias.dtype == torch.float32
    freeze(model := tied(), ["*", "!head.bias"])
    cast_weights(model, "bf16")
    assert model.head.weight is model.embed.weight
    assert model.head.weight.dtype == torch.bfloat16
    model.head(torch.ones(1, 4)).sum().backward()
    assert model.head.bias.grad.tolist() == [1.0] * 4


def test_a_module_may_have_a_forward_pass_for_any_dtype() -> None:
    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.factor = nn.Parameter(torch.tensor([2.0]), requires_grad=False)
            self.any_dtype_forward: Callable[..., Tensor] = lambda module, x: x * module.factor.float()

        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    model = nn.Sequential(Doubling(), nn.Linear(1, 1))
    cast_weights(model, "bf16")
    assert model[0].factor.dtype == torch.bfloat16
    assert model[0](torch.tensor([1.0])).tolist() == [2.0]


def test_settings_without_effect_and_values_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match=r"train.frozen_dtype has no effect, because all parameters are trained"):
        cast_weights(nn.Linear(1, 1), "bf16")
    model = words()
    with torch.no_grad():
        model.layers[1].weight[0, 0] = 1e6
    with pytest.raises(ValueError, match=r"`layers.1.weight` has values too large for fp16; use \"bf16\""):
        cast_weights(model, "fp16")


# ---------------------------------------------------------------------------------------------- checkpoints
def test_a_checkpoint_is_read_in_another_dtype_if_nothing_is_rounded() -> None:
    def replica(dtype: FrozenDtype, value: float) -> Any:
        model: Any = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1))
        nn.init.constant_(model[0].weight, value)
        freeze(model, ["0.*"])
        cast_weights(model, dtype)
        return Plain().holding(model, torch.optim.SGD(model[1].parameters()))

    def saved(one: Any) -> CanonicalState[Any]:
        return CanonicalState({name: Saved(x) for name, x in one.state().model.items()}, {})

    large, small = replica("fp32", 0.5), replica("bf16", 0.25)
    assert small.state().model["0.weight"].dtype == torch.bfloat16
    for one, other in ((large, small), (small, large)):
        assert read(one, saved(other)) == [[other.unwrapped[0].weight[0, 0].item()] * 2] * 2
    exact = saved(replica("fp32", 1.001))
    said = r"`0.weight` is bfloat16 and frozen, but the checkpoint has float32 values that bfloat16 cannot hold"
    with pytest.raises(CheckpointError, match=said):
        read(small, exact)


def read(replica: Any, state: CanonicalState[Any]) -> list[list[float]]:
    """Returns the frozen weight as the replica reads it."""
    own = torch.zeros_like(replica.state().model["0.weight"])
    convert_frozen(state, replica).model["0.weight"].read_into(TensorShard.whole(own).region, own)
    return own.tolist()


RECIPE = """
recipe = 2
name = "frozen"
model = { use = "gpt", vocab_size = 256, block_size = 8, layers = 1, heads = 1, width = 16 }
data.train = { use = "text", split = "train", block_size = 8 }
task = { use = "language_modeling" }
optimizer = { use = "sgd", lr = 0.1 }
[train]
length = "4st"
global_batch = 8
"""


def test_a_run_names_the_key_of_the_recipe_and_sums_up_the_dtypes(
    ddpforge: Callable[..., Ranks], tmp_path: Path
) -> None:
    (tmp_path / "frozen.toml").write_text(RECIPE)
    refused = ddpforge("check", "frozen.toml", "--build", "--set=train.frozen_dtype=bf16", fails=True)
    assert "train.frozen_dtype has no effect, because all parameters are trained" in refused.stderr
    done = ddpforge("run", "frozen.toml", "--set=train.frozen_dtype=bf16", '--set=train.freeze=["*", "!*.bias"]')
    assert "  weights    frozen: 7,344 parameters in bf16, trained: 192 parameters in fp32" in done.stderr


def test_gradients_are_the_same_if_activations_are_recomputed() -> None:
    weight, x = torch.randn(3, 4).bfloat16(), torch.randn(2, 4, requires_grad=True)
    plain = frozen_linear(x, weight, None).square().sum()
    again: Tensor = checkpoint(frozen_linear, x, weight, None, use_reentrant=False).square().sum()
    (wanted,), (found,) = torch.autograd.grad(plain, x), torch.autograd.grad(again, x)
    assert torch.equal(found, wanted)
