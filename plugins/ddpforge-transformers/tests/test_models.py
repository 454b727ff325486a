"""Models of transformers: strict options, and blocks that a strategy can find."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.builtin.models.lora import Adapters
from ddpforge.components.errors import RefusedOptions
from ddpforge.components.registry import Registry
from ddpforge.features.frozen_dtype import cast_weights
from ddpforge.recipe.schema import Component
from tiny import TINY
from torch import nn
from transformers import AutoModelForCausalLM, BertConfig, GPT2Config, GPT2LMHeadModel, GPT2Model

from ddpforge_transformers.data import load_tokenizer
from ddpforge_transformers.models import causal_lm, masked_lm, sequence_classification


def blocks(model: nn.Module) -> list[str]:
    """Returns the class names of the default blocks (see `train.blocks`)."""
    return [type(block).__name__ for path in model.repeated for block in model.get_submodule(path).children()]


def test_random_weights_equal_those_of_transformers() -> None:
    torch.manual_seed(3)
    mine = causal_lm(model_type="gpt2", options=TINY["gpt2"])
    torch.manual_seed(3)
    theirs = AutoModelForCausalLM.from_config(GPT2Config(**TINY["gpt2"]))
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(mine.state_dict()[name], value) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("model_type", "names"),
    [("llama", ["LlamaDecoderLayer"] * 2), ("gpt2", ["GPT2Block"] * 3)],
)
def test_blocks_are_the_no_split_modules(model_type: str, names: list[str]) -> None:
    assert blocks(sequence_classification(classes=2, model_type=model_type, options=TINY[model_type])) == names


def test_model_without_no_split_modules_sets_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GPT2LMHeadModel, "_no_split_modules", None)
    monkeypatch.setattr(GPT2Model, "_no_split_modules", None)
    assert not hasattr(causal_lm(model_type="gpt2", options=TINY["gpt2"]), "repeated")


def test_saved_weights_are_loaded_in_their_own_dtype_and_trained_in_float32(tmp_path: Path) -> None:
    saved = GPT2LMHeadModel(GPT2Config(**TINY["gpt2"])).to(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    loaded = causal_lm(pretrained=str(tmp_path), options={"resid_pdrop": 0.3})
    assert loaded.config.resid_pdrop == 0.3
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}
    cast_weights(loaded, None)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    for name, value in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.float()), name
    torch.manual_seed(1)
    random = causal_lm(pretrained=str(tmp_path), weights=False)
    assert not torch.equal(random.transformer.wte.weight, loaded.transformer.wte.weight)


def test_classifier_loads_the_saved_body_with_a_new_head(tmp_path: Path) -> None:
    saved = sequence_classification(classes=2, model_type="bert", options=TINY["bert"])
    saved.save_pretrained(tmp_path)
    loaded = sequence_classification(classes=5, pretrained=str(tmp_path))
    assert torch.equal(loaded.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)
    assert loaded.classifier.weight.shape == (5, 32)
    assert loaded.outputs == loaded.config.num_labels == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "set either"),
        ({"model_type": "gpt2", "pretrained": "."}, "set either"),
        ({"model_type": "lama"}, "no model_type `lama`; did you mean .*`llama`"),
        ({"model_type": "llama", "options": {"hiden_size": 8}}, "no key `hiden_size`; did you mean `hidden_size`"),
        ({"model_type": "llama", "options": {"hidden_size": "8"}}, "refuses its options"),
        ({"model_type": "llama", "options": {"dtype": "bfloat16"}}, "options.dtype cannot be set"),
        ({"model_type": "vit"}, "cannot build this vit"),
    ],
)
def test_options_that_transformers_would_ignore_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        causal_lm(**options)


def test_a_folder_without_a_model_is_refused_without_traceback(tokenizer: Path) -> None:
    # The registry shows a traceback for errors that other packages raise.
    with pytest.raises(RefusedOptions, match=r"cannot be built: pretrained: Unrecognized model in"):
        Registry.installed().build("model", Component(use="causal_lm", options={"pretrained": str(tokenizer)}))


def test_code_in_the_folder_of_a_saved_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does transformers prompt on the terminal."""
    marker, asked = tmp_path / "marker", list[str]()
    monkeypatch.setattr("builtins.input", lambda question="": asked.append(question) or "y")
    (tmp_path / "code.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model", "AutoTokenizer": ["code.T", None]}
    content = json.dumps({"model_type": "its_own", "auto_map": names, "tokenizer_class": "T"})
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match=r"trust_remote_code|custom code"):
        causal_lm(pretrained=str(tmp_path))
    with pytest.raises(ValueError, match="no tokenizer could be loaded"):
        load_tokenizer(str(tmp_path))
    assert not asked
    assert not marker.exists()


def test_pickled_weights_are_not_loaded(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=8).save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nmkdir\n(V" + str(marker).encode() + b"\ntR.")
    with pytest.raises(Exception, match=r"(?i)weights"):
        causal_lm(pretrained=str(tmp_path))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"hidden_size": 64}, "lm_head.weight"),
        ({"vocab_size": 40}, "lm_head.weight"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight"),
    ],
)
def test_options_that_make_saved_weights_random_are_refused(tmp_path: Path, options: dict[str, int], name: str) -> None:
    causal_lm(model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"would become random, e.g. `{name}`"):
        causal_lm(pretrained=str(tmp_path), options=options)
    with pytest.raises(ValueError, match=r"would become random"):
        sequence_classification(classes=3, pretrained=str(tmp_path), options=options)


def test_configs_are_not_shared() -> None:
    """Options of one model do not change the defaults of BERT's config class."""
    sequence_classification(classes=7, model_type="bert", options=TINY["bert"])
    assert BertConfig().num_labels == 2


@pytest.mark.parametrize(
    ("build", "targets", "train"),
    [(causal_lm, ["q_proj"], []), (masked_lm, ["query"], []), (sequence_classification, ["query"], ["classifier.*"])],
)
def test_adapters_are_an_option_of_every_model(build: Any, targets: list[str], train: list[str]) -> None:
    kind = "llama" if build is causal_lm else "bert"
    more = {"classes": 3} if build is sequence_classification else {}
    plain = build(model_type=kind, options=TINY[kind], **more)
    model = build(model_type=kind, options=TINY[kind], lora=Adapters(targets=targets, r=2, train=train), **more)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len([name for name in trained if "lora_" in name]) == 2 * TINY[kind]["num_hidden_layers"]
    heads = {"classifier.weight", "classifier.bias"} if train else set()
    assert {name for name in trained if "lora_" not in name} == heads
    assert model.config.vocab_size == 32
    assert getattr(model, "repeated", None) == getattr(plain, "repeated", None)  # BERT lists no blocks in 5.0


@pytest.mark.parametrize(("model_type", "layers"), [("llama", 7), ("gpt2", 4)])
def test_all_linear_adapts_all_linear_layers_but_the_output_layer(model_type: str, layers: int) -> None:
    pytest.importorskip("peft")
    model = causal_lm(model_type=model_type, options=TINY[model_type], lora=Adapters(targets="all-linear"))
    adapted = [name for name, _ in model.named_modules() if name.endswith("lora_A.default")]
    assert len(adapted) == layers * model.config.num_hidden_layers
    assert not [name for name in adapted if "lm_head" in name]


def test_a_resized_vocabulary_keeps_the_saved_rows_and_has_new_ones(tmp_path: Path) -> None:
    causal_lm(model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = causal_lm(pretrained=str(tmp_path / "base"), resize_vocabulary=40)
    model.save_pretrained(tmp_path / "larger")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "larger")
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        rows = getattr(again, layer)().weight
        assert rows.shape == (40, 32)
        assert torch.equal(rows[:32], getattr(base, layer)().weight)
    with pytest.raises(ValueError, match="but the saved model has 32 tokens; it can only add tokens"):
        causal_lm(pretrained=str(tmp_path / "base"), resize_vocabulary=31)
    with pytest.raises(ValueError, match=r"set options.vocab_size = 40"):
        causal_lm(model_type="llama", options=TINY["llama"], resize_vocabulary=40)


def test_new_rows_must_be_trained_under_lora(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    causal_lm(model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path / "base")
    options = {"pretrained": str(tmp_path / "base"), "resize_vocabulary": 40}
    with pytest.raises(ValueError, match=r'lora.train = \["model.embed_tokens.\*", "lm_head.\*"\]'):
        causal_lm(**options, lora=Adapters(targets=["q_proj"]))
    model = causal_lm(**options, lora=Adapters(targets=["q_proj"], train=["model.embed_tokens.*", "lm_head.*"]))
    assert model.get_input_embeddings().weight.requires_grad


# ---------------------------------------------------------------------------------------------- heads under adapters
@pytest.mark.parametrize(
    ("build", "options", "head"),
    [
        (sequence_classification, {"classes": 3}, ["score.weight"]),
        (sequence_classification, {"classes": 1}, ["score.weight"]),
        (causal_lm, {}, []),
    ],
)
def test_new_weights_are_trained_under_adapters_and_saved_ones_are_not(
    build: Any, options: dict[str, Any], head: list[str], tmp_path: Path
) -> None:
    causal_lm(model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path / "lm")
    sequence_classification(classes=3, model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path / "three")
    lora = Adapters(targets=["q_proj"], r=2)
    for name in ("lm", "three"):
        if build is causal_lm and name == "three":
            continue
        model = build(pretrained=str(tmp_path / name), lora=lora, **options)
        trained = [key for key, one in model.named_parameters() if one.requires_grad and "lora_" not in key]
        assert trained == ([] if name == "three" and options["classes"] == 3 else head)
    if head:
        fresh = build(model_type="llama", options=TINY["llama"], lora=lora, **options)
        assert fresh.score.weight.requires_grad


def test_an_adapter_on_a_new_or_a_tied_weight_is_refused(tmp_path: Path) -> None:
    causal_lm(model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"lora.targets adapts `score`, which is new.*remove it from the targets"):
        sequence_classification(
            classes=1, pretrained=str(tmp_path / "lm"), lora=Adapters(targets=["q_proj", "score"], r=2)
        )
    tied = TINY["llama"] | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match=r"adapts `lm_head`, whose weight is tied to `model.embed_tokens`"):
        causal_lm(model_type="llama", options=tied, lora=Adapters(targets=["q_proj", "lm_head"], r=2))
    causal_lm(model_type="llama", options=TINY["llama"], lora=Adapters(targets=["q_proj", "lm_head"], r=2))
