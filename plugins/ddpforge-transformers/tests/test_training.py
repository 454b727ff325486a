"""Whole runs on two ranks, and export to transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.builtin.models.lora import lora
from ddpforge.checkpoint.reader import CheckpointReader
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tiny import TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from ddpforge_transformers.models import causal_lm

RECIPE = """
recipe = 2
name = "tiny"
[model]
use = "causal_lm"
model_type = "llama"
options = {{ hidden_size = 32, intermediate_size = 48, num_hidden_layers = 2, num_attention_heads = 4, \
num_key_value_heads = 2, vocab_size = 32, max_position_embeddings = 64, tie_word_embeddings = true }}
[data.train]
use = "tokenized_jsonl"
path = "samples.jsonl"
tokenizer = "{tokenizer}"
max_length = 64
prompt = "ask"
[data.eval]
use = "tokenized_text"
path = "texts"
tokenizer = "{tokenizer}"
block_size = 32
[task]
use = "causal_lm"
metrics = ["accuracy"]
[optimizer]
use = "adamw"
lr = 1e-2
[train]
length = "12st"
global_batch = 16
micro_batch = 4
[checkpoint]
every = "6st"
[track]
every = "1st"
[callbacks.hf]
use = "hf_folder"
tokenizer = "{tokenizer}"
"""


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


MIXTURE = """
[data.train.asked]
use = "tokenized_jsonl"
path = "samples.jsonl"
tokenizer = "{tokenizer}"
max_length = 64
prompt = "ask"
weight = 3
[data.train.short]
use = "tokenized_jsonl"
path = "samples.jsonl"
tokenizer = "{tokenizer}"
max_length = {length}
prompt = "ask"
weight = 1
[data.eval]"""


def test_a_mixture_with_a_limit_of_tokens_has_the_same_curve(
    ddpforge: Callable[..., str], samples: Path, texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    before, _, after = RECIPE.partition("[data.train]")
    recipe = before + MIXTURE + after.partition("[data.eval]")[2]
    (tmp_path / "mixed.toml").write_text(recipe.format(tokenizer=tokenizer, length=64))
    curves = []
    for name, *sets in (("plain",), ("limited", "train.max_tokens=70")):
        ddpforge("run", "mixed.toml", *(f"--set={one}" for one in (f"name={name}", *sets)), ranks=2)
        found = [row for row in rows(tmp_path / "runs" / name) if "train/asked/loss" in row]
        curves.append([row[f"train/{key}"] for row in found for key in ("loss", "asked/loss", "short/loss")])
    assert len(curves[0]) == 36
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)


def test_sources_with_other_options_of_their_batches_are_refused(
    ddpforge: Callable[..., str], samples: Path, texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    before, _, after = RECIPE.partition("[data.train]")
    recipe = before + MIXTURE + after.partition("[data.eval]")[2]
    (tmp_path / "mixed.toml").write_text(recipe.format(tokenizer=tokenizer, length=4))
    message = ddpforge("check", "mixed.toml", "--build", code=2)
    assert "[data.train.short]: several sources share one `collate`" in message


@pytest.mark.parametrize("launcher", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_strategies_train_the_same_curve_and_transformers_loads_the_export(
    ddpforge: Callable[..., str], samples: Path, texts: Path, tokenizer: Path, tmp_path: Path, launcher: bool
) -> None:
    """Tensor parallelism uses the model's own `_tp_plan`."""
    (tmp_path / "tiny.toml").write_text(RECIPE.format(tokenizer=tokenizer))
    curves = {}
    for name, *sets in (
        ("ddp",),
        ("fsdp", "--set=strategy.use=fsdp"),
        ("tensor", "--set=strategy.use=fsdp", "--set=strategy.tensor=2"),
        ("pipeline", "--set=strategy.use=pipeline"),
    ):
        ddpforge("run", "tiny.toml", f"--set=name={name}", *sets, ranks=2, launcher=launcher and name == "ddp")
        curves[name] = [row["train/loss"] for row in rows(tmp_path / "runs" / name) if "train/loss" in row]
    assert len(curves["ddp"]) == 12
    assert curves["ddp"][-1] < 0.7 * curves["ddp"][0]
    assert curves["fsdp"] == pytest.approx(curves["ddp"], rel=1e-5)
    assert curves["tensor"] == pytest.approx(curves["ddp"], rel=1e-5)
    assert curves["pipeline"] == pytest.approx(curves["ddp"], rel=1e-5)

    out = tmp_path / "runs" / "fsdp" / "hf"
    ddpforge("export", "runs/fsdp", "-o", f"{out}/")
    ddpforge("export", "runs/fsdp", "--format", "transformers", "-o", "alone")
    assert {path.name for path in (tmp_path / "alone").iterdir()} == {path.name for path in out.iterdir()}
    out = tmp_path / "alone"
    model = AutoModelForCausalLM.from_pretrained(out)
    words = AutoTokenizer.from_pretrained(out)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert "lm_head.weight" not in load_file(out / "model.safetensors")

    # transformers computes the same loss and accuracy from the folder as ddpforge's evaluation: of each document alone.
    loss = right = count = 0.0
    text = [(texts / "a.txt").read_text()]
    text += [json.loads(line)["text"] for line in (texts / "b.jsonl").read_text().splitlines()]
    tokens = [token for each in text for token in [*words(each)["input_ids"], words.eos_token_id]]
    for start in range(0, len(tokens) - 31, 32):
        block = torch.tensor(tokens[start : start + 32])
        ends = (block == words.eos_token_id).nonzero().flatten() + 1
        for ids in block.tensor_split(ends):
            if len(ids) < 2:
                continue
            with torch.no_grad():
                found = model(input_ids=ids[None], labels=ids[None])
            loss += found.loss.item() * (len(ids) - 1)
            right += (found.logits[0, :-1].argmax(dim=-1) == ids[1:]).sum().item()
            count += len(ids) - 1
    final = [row for row in rows(tmp_path / "runs" / "fsdp") if "eval/loss" in row][-1]
    assert final["eval/loss"] == pytest.approx(loss / count, rel=1e-5)
    assert final["eval/accuracy"] == pytest.approx(right / count, abs=0.002)

    # Another run begins with the weights of the exported folder.
    ddpforge("run", "tiny.toml", f"--set=checkpoint.init_from={out}", "--set=name=again", "--set=train.length=1st")
    begin = rows(tmp_path / "runs" / "again")[0]["train/loss"]
    assert begin < 0.75 * curves["fsdp"][0]


def test_invalid_options_are_errors_of_the_recipe(
    ddpforge: Callable[..., str], samples: Path, texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE.format(tokenizer=tokenizer).replace("vocab_size", "vocabulary"))
    said = ddpforge("run", "tiny.toml", code=2)
    assert "has no key `vocabulary`" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("model_type", "targets"),
    [
        pytest.param("llama", ["q_proj", "v_proj"], marks=pytest.mark.slow),  # adapters of nn.Linear: test_export.py
        ("gpt2", ["c_attn", "c_proj"]),
    ],
)
def test_only_adapters_are_trained_and_transformers_loads_the_merged_export(
    ddpforge: Callable[..., str],
    samples: Path,
    texts: Path,
    tokenizer: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_type: str,
    targets: list[str],
) -> None:
    """Both runs train the same model: one with ddpforge's `lora` around it, the other with the model's option `lora`.

    The base model is a folder of transformers. The checkpoints of the second run contain only the adapters.
    """
    torch.manual_seed(0)
    base = causal_lm(model_type=model_type, options=TINY[model_type])
    base.save_pretrained(tmp_path / "base")
    begin, end = RECIPE.index("[model]"), RECIPE.index("[data.train]")
    nested = '{{ use = "causal_lm", pretrained = "base" }}'
    model = f'[model]\nuse = "lora"\nbase = {nested}\nr = 4\ntargets = {json.dumps(targets)}\n'
    (tmp_path / "tiny.toml").write_text((RECIPE[:begin] + model + RECIPE[end:]).format(tokenizer=tokenizer))
    ddpforge("run", "tiny.toml", ranks=2)
    option = (
        f'[model]\nuse = "causal_lm"\npretrained = "base"\nlora = {{{{ r = 4, targets = {json.dumps(targets)} }}}}\n'
    )
    (tmp_path / "tiny.toml").write_text((RECIPE[:begin] + option + RECIPE[end:]).format(tokenizer=tokenizer))
    sets = ("--set=checkpoint.save=trainable", "--set=name=small", "--set=strategy.use=fsdp")
    ddpforge("run", "tiny.toml", *sets, ranks=2)
    last = [rows(tmp_path / "runs" / name)[-1]["eval/loss"] for name in ("tiny", "small")]
    assert last[0] == pytest.approx(last[1], rel=1e-5)

    *_, checkpoint = sorted((tmp_path / "runs/small/checkpoints").glob("step-*"))
    assert all("lora_" in name for name in CheckpointReader(checkpoint).state().model)

    assert "transformers cannot load them" in ddpforge("export", "runs/tiny", "--format", "transformers", code=2)
    ddpforge("export", "runs/tiny", "--merge", "--format", "transformers", "-o", "runs/tiny/hf/")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "runs/tiny/hf")
    ddpforge("export", "runs/small", "--include", "*lora_*", "-o", "adapters.safetensors")
    again = lora(base=causal_lm(pretrained=str(tmp_path / "base")), r=4, targets=targets).eval()
    missing, unexpected = again.load_state_dict(load_file(tmp_path / "adapters.safetensors"), strict=False)
    assert not unexpected
    assert not any("lora_" in name for name in missing)
    ids = torch.arange(16).view(2, 8)
    torch.testing.assert_close(merged(ids).logits, again(ids).logits, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged(ids).logits, base.eval()(ids).logits, atol=1e-3)

    assert "--merge cannot be combined" in ddpforge("export", "runs/small", "--format", "peft", "--merge", code=2)
    ddpforge("export", "runs/small", "--format", "peft", "-o", "runs/small/peft/")
    monkeypatch.chdir(tmp_path)  # the folder names its base model, "base"
    adapted = AutoPeftModelForCausalLM.from_pretrained("runs/small/peft").eval()
    torch.testing.assert_close(adapted(ids).logits, again(ids).logits, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # test_output_layer.py has losses and gradients, and the test of all strategies the curve
def test_a_loss_in_the_output_layer_has_the_same_curve_under_all_strategies(
    ddpforge: Callable[..., str], samples: Path, texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    recipe = RECIPE.format(tokenizer=tokenizer).replace('metrics = ["accuracy"]\n', "z_loss = 1e-3\n")
    (tmp_path / "tiny.toml").write_text(recipe.replace("12st", "5st"))
    curves = {}
    chunks, untied = "--set=task.loss_chunk=5", "--set=model.options.tie_word_embeddings=false"
    for name, ranks, *sets in (
        ("plain", 2),
        ("alone", 1, chunks),
        ("ddp", 2, chunks),
        ("fsdp", 2, chunks, "--set=strategy.use=fsdp"),
        ("untied", 1, untied),
        ("units", 2, chunks, untied, "--set=strategy.use=fsdp", '--set=train.blocks=["LlamaDecoderLayer", "Linear"]'),
        ("zero2", 2, chunks, "--set=strategy.use=deepspeed", "--set=strategy.stage=2"),
        ("zero3", 2, chunks, "--set=strategy.use=deepspeed", "--set=strategy.stage=3"),
    ):
        ddpforge("run", "tiny.toml", f"--set=name={name}", *sets, ranks=ranks)
        curves[name] = [row.get("train/loss", row.get("eval/loss")) for row in rows(tmp_path / "runs" / name)]
    assert len(curves["plain"]) >= 5
    for name, curve in curves.items():
        plain = curves["untied" if name == "units" else "plain"]
        assert name == "untied" or curve == pytest.approx(plain, rel=1e-5), name
    message = ddpforge("check", "tiny.toml", chunks, "--set=strategy.use=pipeline", code=2)
    assert "computes its loss within the model's forward pass" in message
