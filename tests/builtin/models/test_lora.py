"""The model `lora`: its adapters train alone and can be merged into the weights."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
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
from ddpforge.interop.adapters import adapter_config
from ddpforge.interop.export import export, export_adapters
from ddpforge.strategies.named_state import tensors

TOKENS = torch.randint(16, (2, 8), generator=torch.Generator().manual_seed(0))


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=16, block_size=8, layers=2, heads=2, width=16)


def adapted(**options: float) -> nn.Module:
    """Returns a GPT with nonzero adapters."""
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


def test_lora_starts_as_its_base_model_and_trains_only_its_adapters() -> None:
    model = lora(base=gpt(), r=4, targets=["qkv"], train=["norm.*"])
    assert torch.equal(model(TOKENS), gpt()(TOKENS))
    trained = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    assert trained.pop("norm.weight") == trained.pop("norm.bias") == (16,)
    assert set(trained.values()) == {(4, 16), (48, 4)}
    assert len(trained) == 4
    assert model.vocab_size == 16  # an attribute of the base model, which checks of the data read


@pytest.mark.parametrize(("options", "scaling"), [({}, 1.0), ({"rslora": False}, 1.0), ({"rslora": True}, 4.0)])
def test_rslora_divides_alpha_by_the_root_of_the_rank(options: dict[str, Any], scaling: float) -> None:
    model = lora(base=gpt(), targets=["qkv"], r=16, alpha=16, **options)
    found = {name: float(value) for name, value in model.named_buffers() if name.endswith("lora_scaling")}
    assert len(found) == 2
    assert set(found.values()) == {scaling}


def adapted_layers(model: nn.Module) -> list[str]:
    return [
        name.removesuffix(".lora_A.default") for name, _ in model.named_modules() if name.endswith("lora_A.default")
    ]


def test_targets_are_globs_of_whole_names_or_all_linear_layers() -> None:
    def net() -> nn.Module:
        return nn.ModuleDict(
            {
                "mlp": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)),
                "norm": nn.LayerNorm(4),
                "attention": nn.MultiheadAttention(4, 1),
                "head": nn.Linear(4, 3),
            }
        )

    assert adapted_layers(lora(base=net(), targets="all-linear")) == ["mlp.0", "mlp.1", "head"]
    assert adapted_layers(lora(base=net(), targets=["mlp.*"])) == ["mlp.0", "mlp.1"]
    assert adapted_layers(lora(base=net(), targets=["*.1", "head"])) == ["mlp.1", "head"]
    with pytest.raises(ValueError, match=r"targets: `mpl.\*` matches no linear layer by its whole name, e.g. mlp.0"):
        lora(base=net(), targets=["mpl.*"])
    with pytest.raises(ValueError, match="no linear layer besides its output layer"):
        lora(base=nn.LayerNorm(4), targets="all-linear")


def test_adapters_are_scaled_by_alpha_over_r() -> None:
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
def test_invalid_targets_are_refused(options: dict[str, list[str]], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        lora(base=gpt(), **options)  # type: ignore[arg-type]


def test_ranks_and_alphas_by_layer_are_those_of_peft() -> None:
    """Checks also the exported config. The last pattern that matches a layer counts."""
    patterns = {"rank_pattern": {"qkv": 2, "blocks.1.*": 3}, "alpha_pattern": {"*.mlp.0": 8}}
    model = lora(base=gpt(), targets=["qkv", "mlp.0"], r=4, alpha=2, **patterns)  # type: ignore[arg-type]
    ranks = {name: x.shape[0] for name, x in model.named_parameters() if "lora_A" in name}
    assert list(ranks.values()) == [2, 4, 3, 3]  # qkv and the MLP of block 0, then of block 1
    scalings = [float(x) for name, x in model.named_buffers() if name.endswith("lora_scaling")]
    assert scalings == pytest.approx([2 / 2, 8 / 4, 2 / 3, 8 / 3])
    again = peft.inject_adapter_in_model(adapter_config(model), gpt())
    assert {name: x.shape[0] for name, x in again.named_parameters() if "lora_A" in name} == ranks


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_match_no_adapted_layer_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match=rf"{key}: `head` matches no adapted layer, e.g. blocks.0.attention.qkv"):
        lora(base=gpt(), targets=["qkv"], **{key: {"head": 2}})  # type: ignore[arg-type]


def test_pissa_begins_with_the_largest_singular_values_and_keeps_the_outputs() -> None:
    model, base = lora(base=gpt(), targets=["qkv"], r=4, alpha=2, init="pissa"), gpt()
    torch.testing.assert_close(model(TOKENS), base(TOKENS))
    layer: Any = model.get_submodule("blocks.0.attention.qkv")
    weight = base.get_parameter("blocks.0.attention.qkv.weight").detach()
    update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    torch.testing.assert_close(update, u[:, :4] * s[:4] @ vh[:4])
    torch.testing.assert_close(layer.base_layer.weight, weight - update)


def test_initial_adapters_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match=r'init = "loftq" needs quantized layers, and `blocks.0.attention.qkv` is not'):
        lora(base=gpt(), targets=["qkv"], init="loftq")
    with pytest.raises(ValueError, match='init = "loftq" and `dora` cannot be used together'):
        lora(base=gpt(), targets=["qkv"], init="loftq", dora=True)
    model = lora(base=gpt(), targets=["qkv"], init="pissa")
    with pytest.raises(UsageError, match="a folder of peft has adapters for the saved weights"):
        adapter_config(model)


def test_base_model_on_the_meta_device_is_refused() -> None:
    with torch.device("meta"):
        base = gpt()
    with pytest.raises(UsageError, match="cannot be built on the meta device"):
        lora(base=base, targets=["qkv"])


def test_error_for_missing_peft_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(SetupError) as caught:
        lora(base=gpt(), targets=["qkv"])
    assert caught.value.hints == ("pip install 'peft>=0.18'",)


# ---------------------------------------------------------------------------------------------- folded
def test_merged_export_has_the_names_of_the_base_model_and_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    merged = load_file(export(checkpoint, tmp_path / "merged.safetensors", merge=True).file)
    plain = gpt()
    plain.load_state_dict(merged)
    torch.testing.assert_close(plain(TOKENS), adapted()(TOKENS), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(plain(TOKENS), gpt()(TOKENS), atol=0.1)
    assert list(merged) == list(plain.state_dict())


def test_glob_exports_adapters_alone(checkpoint: Path, tmp_path: Path) -> None:
    adapters = load_file(export(checkpoint, tmp_path / "adapters.safetensors", only=["*lora_[AB]*"]).file)
    assert len(adapters) == 8
    assert sum(x.numel() for x in adapters.values()) == 2 * (4 * 16 + 48 * 4 + 4 * 16 + 64 * 4)


def test_merge_transposes_the_adapters_of_conv1d_layers(tmp_path: Path) -> None:
    """Merges a square layer of GPT-2's kind, whose shape does not show that its weight is transposed."""
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


def test_folder_of_peft_loads_into_the_base_model_with_the_same_logits(checkpoint: Path, tmp_path: Path) -> None:
    done = export_adapters(checkpoint, tmp_path / "peft", adapted())
    assert sorted(path.name for path in (tmp_path / "peft").iterdir()) == sorted(done.paths)
    import peft

    loaded = peft.PeftModel.from_pretrained(gpt(), tmp_path / "peft").eval()
    torch.testing.assert_close(loaded(TOKENS), adapted().eval()(TOKENS), rtol=0, atol=0)
    assert done.tensors == 8
    with pytest.raises(UsageError, match=r"adapter_model.safetensors exists"):
        export_adapters(checkpoint, tmp_path / "peft", adapted())
    export_adapters(checkpoint, tmp_path / "peft", adapted(), force=True)


def test_folder_of_peft_holds_modules_that_are_trained_without_adapters(tmp_path: Path) -> None:
    model = lora(base=gpt(), targets=["qkv"], train=["norm.weight"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                nn.init.normal_(parameter, generator=torch.Generator().manual_seed(len(name)))
    kept, aliases = tensors(model)
    trainable = {name for name, x in model.named_parameters() if x.requires_grad}
    saved = CanonicalState({name: x.detach() for name, x in kept.items() if name in trainable}, {}, aliases)
    checkpoint = write(tmp_path / "checkpoints", checkpoint_of(7, state=saved))
    base = {name: x.detach() for name, x in model.state_dict().items()}  # norm.bias is frozen, so it is not saved
    export_adapters(checkpoint, tmp_path / "peft", model, base=base)
    import peft

    loaded = peft.PeftModel.from_pretrained(gpt(), tmp_path / "peft").eval()
    torch.testing.assert_close(loaded(TOKENS), model.eval()(TOKENS), rtol=0, atol=0)
    assert json.loads((tmp_path / "peft/adapter_config.json").read_text())["modules_to_save"] == ["norm"]


def test_folder_of_peft_refuses_models_that_it_cannot_hold(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="GPT has no adapters"):
        export_adapters(checkpoint, tmp_path / "peft", gpt())
    biased = lora(base=gpt(), targets=["qkv"], train=["*qkv.base_layer.weight"])
    with pytest.raises(UsageError, match=r"`blocks.0.attention.qkv.base_layer.weight` is trained without an adapter"):
        export_adapters(checkpoint, tmp_path / "peft", biased)
    assert not (tmp_path / "peft").exists()


@pytest.mark.parametrize(
    ("drop", "complaint"),
    [
        ("lora_", "the checkpoint contains no adapters"),
        ("base_layer.weight", r"has no `blocks.0.attention.qkv.base_layer.weight`"),
        ("lora_scaling", r"has no `blocks.0.attention.qkv.lora_scaling`"),
    ],
)
def test_checkpoint_without_complete_adapters_is_refused(tmp_path: Path, drop: str, complaint: str) -> None:
    model, _ = tensors(adapted())
    kept = {name: x.detach() for name, x in model.items() if drop not in name}
    checkpoint = write(tmp_path / "checkpoints", checkpoint_of(7, state=CanonicalState(kept, {})))
    with pytest.raises(UsageError, match=complaint):
        export(checkpoint, tmp_path / "merged.safetensors", merge=True)


class Tied(nn.Module):
    """An embedding, and a layer that shares its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.scores = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False)
        self.scores.weight = self.tokens.weight


@pytest.mark.parametrize("first", ["tokens.weight", "scores.base_layer.weight"])
def test_merge_of_a_weight_tied_to_one_without_adapter_is_refused(tmp_path: Path, first: str) -> None:
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


def test_merge_builds_the_base_model_from_the_recipe_if_the_checkpoint_omits_it(
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
