"""What the model `lora` promises, and that its adapters can be folded into the weights."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint.doubles import checkpoint_of, write
from safetensors.torch import load_file
from torch import nn

from ddpforge.app.api import load
from ddpforge.builtin.models.gpt import GPT
from ddpforge.builtin.models.lora import lora
from ddpforge.builtin.models.mlp import MLP
from ddpforge.errors import SetupError, UsageError
from ddpforge.interfaces import CanonicalState
from ddpforge.interop.export import export
from ddpforge.strategies.named_state import tensors

TOKENS = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=16, block_size=8, layers=2, heads=2, width=16)


def adapted(**options: float) -> nn.Module:
    """A GPT whose adapters have learnt something."""
    model = lora(base=gpt(), targets=["qkv", "mlp.0"], **{"r": 4, "alpha": 2} | options)  # type: ignore[arg-type]
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return model


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    model, aliases = tensors(adapted())
    state = CanonicalState({name: x.detach() for name, x in model.items()}, {}, aliases)
    return write(tmp_path / "checkpoints", checkpoint_of(7, state=state))


def test_an_adapted_model_begins_as_its_base_and_trains_its_adapters_alone() -> None:
    model = lora(base=gpt(), r=4, targets=["qkv"], train=["norm.*"])
    assert torch.equal(model(TOKENS), gpt()(TOKENS))
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert trained.pop("norm.weight") == trained.pop("norm.bias") == (16,)
    assert set(trained.values()) == {(4, 16), (48, 4)}
    assert len(trained) == 4
    assert model.vocab_size == 16  # what data is compared with is still there


def test_what_adapters_add_is_scaled_by_alpha_over_r() -> None:
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model[0].weight)
    small = lora(base=model, r=4, alpha=2, targets=["0"])
    for name, parameter in small.named_parameters():
        if "lora" in name:
            nn.init.ones_(parameter)
    assert small(torch.ones(1, 1)).item() == 4 * 2 / 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"targets": ["q_proj"]}, "peft cannot adapt q_proj: "),
        ({"targets": ["tokens"]}, "tokens is a _Embedding, but only linear layers can be adapted"),
        ({"targets": ["qkv"], "train": ["score*"]}, r"train: `score\*` matches no parameter"),
    ],
)
def test_what_is_not_there_is_refused(options: dict[str, list[str]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        lora(base=gpt(), **options)  # type: ignore[arg-type]


def test_a_model_without_memory_is_refused() -> None:
    with torch.device("meta"):
        base = gpt()
    with pytest.raises(UsageError, match="cannot be built on the meta device"):
        lora(base=base, targets=["qkv"])


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SetupError) as caught:
        lora(base=gpt(), targets=["qkv"])
    assert caught.value.hints == ("pip install 'ddpforge[lora]'",)


# ---------------------------------------------------------------------------------------------- folded
def test_a_merged_export_is_the_base_model_and_gives_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    merged = load_file(export(checkpoint, tmp_path / "merged.safetensors", merge=True).file)
    plain = gpt()
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(TOKENS), adapted()(TOKENS), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain(TOKENS), gpt()(TOKENS), atol=0.1)
    assert list(merged) == list(plain.state_dict())


def test_adapters_alone_are_exported_by_a_glob(checkpoint: Path, tmp_path: Path) -> None:
    adapters = load_file(export(checkpoint, tmp_path / "adapters.safetensors", only=["*lora_[AB]*"]).file)
    assert len(adapters) == 8
    assert sum(x.numel() for x in adapters.values()) == 2 * (4 * 16 + 48 * 4 + 4 * 16 + 64 * 4)


def test_a_layer_with_inputs_first_is_folded_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2's linear layers; a square one does not show it by its shape."""
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [5.0]])
    model = {
        "l.base_layer.weight": torch.zeros(2, 2),
        "l.lora_A.default.weight": a,
        "l.lora_B.default.weight": b,
        "l.lora_scaling": torch.tensor(0.5),
        "l.lora_transposed": torch.tensor(1, dtype=torch.uint8),
    }
    checkpoint = write(tmp_path / "checkpoints", checkpoint_of(7, state=CanonicalState(model, {})))
    merged = load_file(export(checkpoint, tmp_path / "merged.safetensors", merge=True).file)
    assert merged["l.weight"].tolist() == [[1.5, 2.5], [3.0, 5.0]]


@pytest.mark.parametrize(
    ("drop", "complaint"),
    [
        ("lora_", "the checkpoint contains no adapters"),
        ("base_layer.weight", r"has no `blocks.0.attention.qkv.base_layer.weight`"),
        ("lora_scaling", r"has no `blocks.0.attention.qkv.lora_scaling`"),
    ],
)
def test_what_cannot_be_folded_is_refused(tmp_path: Path, drop: str, complaint: str) -> None:
    model, _ = tensors(adapted())
    kept = {name: x.detach() for name, x in model.items() if drop not in name}
    checkpoint = write(tmp_path / "checkpoints", checkpoint_of(7, state=CanonicalState(kept, {})))
    with pytest.raises(UsageError, match=complaint):
        export(checkpoint, tmp_path / "merged.safetensors", merge=True)


class Tied(nn.Module):
    """An embedding, and a layer with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scores = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.scores.weight = self.tokens.weight


@pytest.mark.parametrize("first", ["tokens.weight", "scores.base_layer.weight"])
def test_a_weight_that_others_use_without_the_adapter_is_not_folded(tmp_path: Path, first: str) -> None:
    model, aliases = tensors(lora(base=Tied(), targets=["scores"]))
    (alias, name) = aliases.popitem()
    state = {(first if key == name else key): x.detach() for key, x in model.items()}
    saved = CanonicalState(state, {}, {name if first == alias else alias: first})
    checkpoint = write(tmp_path / "checkpoints", checkpoint_of(7, state=saved))
    with pytest.raises(
        UsageError, match=r"`scores.weight` is tied to `tokens.weight`, which does not have this adapter"
    ):
        export(checkpoint, tmp_path / "merged.safetensors", merge=True)


RECIPE = """
recipe = 2
name = "run"
[model]
use = "lora"
targets = ["layers.0"]
base = { use = "mlp", inputs = 64, outputs = 10, hidden = [16] }
[data.train]
use = "digits"
split = "test"
[task]
use = "classification"
[optimizer]
use = "adamw"
lr = 1e-2
[train]
length = "4st"
global_batch = 32
[checkpoint]
save = "trainable"
"""


def test_adapters_of_a_checkpoint_that_leaves_the_base_out_are_merged_into_what_the_recipe_builds(
    ddpforge: Callable[..., object], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RECIPE)
    ddpforge("run", "run.toml")
    ddpforge("export", "runs/run", "--merge", "-o", "merged.safetensors")
    merged = load_file(tmp_path / "merged.safetensors")
    adapted = load(tmp_path / "runs/run").model()
    plain = MLP(inputs=64, outputs=10, hidden=[16])
    assert not any("lora" in name for name in merged)
    plain.load_state_dict(merged)
    images = torch.randn(3, 64)
    torch.testing.assert_close(plain.eval()(images), adapted(images))
    assert any(tensor.abs().sum() > 0 for name, tensor in adapted.state_dict().items() if "lora_B" in name)
