"""`checkpoint.init_from` with weights saved by transformers, under its names. Nothing is downloaded."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.builtin.models.lora import Adapters
from ddpforge.errors import UsageError
from ddpforge.ranks.collectives import SingleRank
from ddpforge.strategies.named_state import tensors
from ddpforge.training.initial_weights import load_initial
from safetensors.torch import save_file
from tiny import TINY
from torch import nn
from transformers import AutoModel, BertConfig

from ddpforge_transformers.models import causal_lm, masked_lm, sequence_classification


def begin(model: nn.Module, source: Path, *skip: str) -> None:
    held, aliases = tensors(model)

    def take(saved: Any) -> None:
        model.load_state_dict({name: tensor.read() for name, tensor in saved.items()}, strict=False)

    load_initial(str(source), held, aliases, take, SingleRank(torch.device("cpu")), skip=skip)


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_classifier_loads_the_body_of_a_language_model_and_reports_missing_tensors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shard: str
) -> None:
    saved = masked_lm(model_type="bert", options=TINY["bert"])
    saved.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    model = sequence_classification(classes=5, pretrained=str(tmp_path), weights=False)
    head = model.classifier.weight.clone()
    with caplog.at_level(logging.INFO, logger="ddpforge"):
        begin(model, tmp_path)
    theirs, mine = saved.state_dict(), model.state_dict()
    body = [name for name in mine if name in theirs]
    assert len(body) > 30
    assert all(torch.equal(mine[name], theirs[name]) for name in body)
    assert torch.equal(model.classifier.weight, head)
    assert "4 tensors not in it: bert.pooler.dense.bias, bert.pooler.dense.weight, classifier.bias" in caplog.text
    assert "tensors not in the model: cls.predictions.bias" in caplog.text


def test_ignored_head_of_another_size_is_not_loaded(tmp_path: Path) -> None:
    saved = sequence_classification(classes=2, model_type="bert", options=TINY["bert"])
    saved.save_pretrained(tmp_path)
    model = sequence_classification(classes=5, pretrained=str(tmp_path), weights=False)
    with pytest.raises(Exception, match=r"`classifier.weight` is \[5, 32\] in the model and \[2, 32\]"):
        begin(model, tmp_path)
    begin(model, tmp_path, "classifier.*")
    assert torch.equal(model.bert.pooler.dense.weight, saved.bert.pooler.dense.weight)


def test_tied_head_follows_the_saved_embedding(tmp_path: Path) -> None:
    saved = causal_lm(model_type="gpt2", options=TINY["gpt2"])
    saved.save_pretrained(tmp_path)
    model = causal_lm(pretrained=str(tmp_path), weights=False)
    begin(model, tmp_path)
    assert model.lm_head.weight is model.transformer.wte.weight
    assert torch.equal(model.lm_head.weight, saved.lm_head.weight)


def test_body_without_head_has_other_names_and_is_refused(tmp_path: Path) -> None:
    """transformers itself adds the prefix of the body; so `pretrained` accepts such a folder."""
    AutoModel.from_config(BertConfig(**TINY["bert"])).save_pretrained(tmp_path)
    model = masked_lm(model_type="bert", options=TINY["bert"])
    with pytest.raises(UsageError, match="none of its tensors has the name of one in the model") as found:
        begin(model, tmp_path)
    assert any("it has embeddings." in hint for hint in found.value.hints)


LORA = Adapters(targets=["q_proj"], r=2)


@pytest.mark.parametrize(
    ("theirs", "mine", "count", "names"),
    [
        ({}, {"lora": LORA}, "2 layers", ("self_attn.q_proj.weight", "self_attn.q_proj.base_layer.weight")),
        ({"lora": LORA}, {}, "2 layers", ("self_attn.q_proj.base_layer.weight", "self_attn.q_proj.weight")),
        (
            {"lora": LORA},
            {"lora": LORA, "quantize": "int8"},
            "14 layers",
            ("mlp.down_proj.weight", "mlp.down_proj.packed"),
        ),
    ],
    ids=["adapters", "no-adapters", "quantized"],
)
def test_layers_in_another_form_are_refused(
    tmp_path: Path, theirs: dict[str, Any], mine: dict[str, Any], count: str, names: tuple[str, str]
) -> None:
    """Otherwise the model would mix two bases: its own adapted layers, and the other layers of the source."""
    causal_lm(model_type="llama", options=TINY["llama"]).save_pretrained(tmp_path / "base")
    source, model = (causal_lm(pretrained=str(tmp_path / "base"), **options) for options in (theirs, mine))
    save_file(dict(source.state_dict()), tmp_path / "source.safetensors")
    there, here = (f"`model.layers.0.{name}`" for name in names)
    with pytest.raises(UsageError, match=rf"{count} have another form than in the model.* {there} is {here}") as found:
        begin(model, tmp_path / "source.safetensors")
    globs = json.loads(found.value.hints[1].rpartition(" = ")[2])
    begin(model, tmp_path / "source.safetensors", *globs)
