"""The model `gpt`: causality, tied embeddings, GPT-2's initial weights, the meta device."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.builtin.models.gpt import GPT


def small(**options: object) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "block_size": 64, "layers": 2, "heads": 2, "width": 32}
    return GPT(**{**sizes, **options})  # type: ignore[arg-type]


def tokens(batch: int = 2, length: int = 16) -> Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(1))


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_number_of_parameters_follows_from_the_sizes() -> None:
    embeddings = (256 + 64) * 32
    attention = 32 * 96 + 96 + 32 * 32 + 32
    mlp = 32 * 128 + 128 + 128 * 32 + 32
    norm = 2 * 32
    assert size(small()) == embeddings + 2 * (attention + mlp + 2 * norm) + norm == 35_712


def test_untied_embeddings_add_an_output_layer_and_bias_false_removes_every_bias() -> None:
    assert size(small(tie_embeddings=False)) == size(small()) + 256 * 32
    biases = [name for name, _ in small(bias=False).named_parameters() if name.endswith("bias")]
    assert biases == []


def test_logits_have_one_row_per_position() -> None:
    assert small()(tokens(3, 64)).shape == (3, 64, 256)


@pytest.mark.parametrize("place", [0, 7, 15])
def test_changed_token_changes_logits_from_its_position_on_only(place: int) -> None:
    model, before = small().eval(), tokens(1)
    after = before.clone()
    after[0, place] += 1
    changed = (model(before) != model(after)).any(dim=-1)[0]
    assert changed.tolist() == [position >= place for position in range(16)]


def test_output_layer_shares_the_weights_of_the_token_embedding() -> None:
    model = small()
    assert not any(name.startswith("head") for name in model.state_dict())
    with torch.no_grad():
        model.tokens.weight[255] = 0  # a token that does not occur in the input
    seen = tokens().clamp(max=254)
    assert torch.count_nonzero(model(seen)[..., 255]) == 0


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_gradient_reaches_every_parameter(tie_embeddings: bool) -> None:
    model = small(tie_embeddings=tie_embeddings)
    F.cross_entropy(model(tokens()).flatten(0, 1), tokens().flatten()).backward()  # type: ignore[no-untyped-call]
    assert [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_initial_weights_have_the_standard_deviations_of_gpt2() -> None:
    model = small(width=256, layers=8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            writes_to_stream = name.endswith(("projection.weight", "mlp.2.weight"))
            expected = 0.02 / math.sqrt(2 * 8) if writes_to_stream else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name


def test_untrained_model_predicts_a_uniform_distribution() -> None:
    loss = F.cross_entropy(small()(tokens()).flatten(0, 1), tokens().roll(1).flatten())
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_dropout_acts_in_training_only() -> None:
    model = small(dropout=0.5)
    assert not torch.equal(model(tokens()), model(tokens()))
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_reset_parameters_initialises_a_model_from_the_meta_device() -> None:
    with torch.device("meta"):
        model = small()
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, math.nan)

    for module in model.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    assert [name for name, p in model.named_parameters() if p.isnan().any()] == []
    assert model.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.get_parameter("blocks.1.mlp.2.weight").std().item() == pytest.approx(0.01, rel=0.05)
    assert model.get_parameter("blocks.1.mlp.2.bias").abs().max().item() == 0


def test_gpt_declares_its_repeated_blocks() -> None:
    model = small()
    repeated = [block for name in GPT.repeated for block in model.get_submodule(name).children()]
    assert [type(block).__name__ for block in repeated] == ["Block", "Block"]


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="heads = 5 does not divide width = 32: use heads = 4 or 8, or a width"):
        small(heads=5)


def test_sequence_longer_than_block_size_is_refused() -> None:
    with pytest.raises(ValueError, match="a sequence of 65 tokens is longer than the model's block_size = 64"):
        small()(tokens(1, 65))


def test_causal_false_lets_every_position_attend_to_every_other() -> None:
    model, before = small(causal=False).eval(), tokens(1)
    after = before.clone()
    after[0, 15] += 1
    assert (model(before) != model(after)).any(dim=-1).all()


def test_classes_option_returns_one_row_of_logits_per_sequence() -> None:
    model = small(classes=3)
    assert model(tokens(4)).shape == (4, 3)
    assert model.outputs == 3
    assert size(model) == size(small()) + 32 * 3 + 3
