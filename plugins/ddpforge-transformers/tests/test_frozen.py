"""Frozen weights in their saved dtype: the same numbers as in float32, under every strategy."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.app.api import load
from ddpforge.builtin.models.lora import Adapters
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.features.frozen_dtype import FrozenDtype, cast_weights
from ddpforge.training.contract import count_parameters
from safetensors.torch import load_file
from tiny import TINY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ddpforge_transformers.models import causal_lm

LLAMA = {**TINY["llama"], "head_dim": 8, "vocab_size": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("llama", "mistral", "qwen3", "gemma", "gemma3_text"), LLAMA),
    "gpt2": TINY["gpt2"],
}


def save(folder: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    """Saves a model with random weights."""
    torch.manual_seed(0)
    model: Any = causal_lm(model_type=family, options=FAMILIES[family])
    with torch.no_grad():  # embeddings of usual size: differences of single layers are then visible in the logits
        for parameter in model.parameters():
            parameter.mul_(2)
    model.to(dtype).save_pretrained(folder)
    return folder


def adapted(folder: Path, frozen_dtype: FrozenDtype | None, *, dora: bool | None) -> nn.Module:
    targets = ["c_attn"] if folder.name == "gpt2" else ["q_proj"]
    torch.manual_seed(1)
    model = causal_lm(pretrained=str(folder), lora=Adapters(targets=targets, r=4, dora=dora))
    cast_weights(model, frozen_dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at the start
                parameter.normal_(std=0.1)
    return model


def results(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.arange(24).view(2, 12) % 32
    logits = model(input_ids=ids).logits
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dora", [None, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_on_saved_weights_compute_the_numbers_of_a_float32_base(
    family: str, dora: bool | None, tmp_path: Path
) -> None:
    """All weights outside the adapters stay in bfloat16; constants such as the scale of embeddings are not rounded."""
    folder = save(tmp_path / family, family)
    small, large = adapted(folder, None, dora=dora), adapted(folder, "fp32", dora=dora)
    assert count_parameters(small).frozen.keys() == {"bf16"}
    assert count_parameters(large).frozen.keys() == {"fp32"}
    assert {p.dtype for p in small.parameters() if p.requires_grad} == {torch.float32}
    (found, own), (logits, gradients) = results(small), results(large)
    assert torch.equal(found, logits)
    assert own.keys() == gradients.keys()
    assert all(torch.equal(own[name], value) for name, value in gradients.items())
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    buffers = dict(reference.named_buffers())
    assert all(torch.equal(value, buffers[name]) for name, value in small.named_buffers() if name in buffers)


# ---------------------------------------------------------------------------------------------- runs
RECIPE = """
recipe = 2
name = "{name}"
[model]
use = "causal_lm"
pretrained = "base"
lora = {{ targets = ["q_proj", "v_proj"], r = 4 }}
[data.train]
use = "tokenized_text"
path = "texts"
tokenizer = "{tokenizer}"
block_size = 16
[task]
use = "causal_lm"
[optimizer]
use = "adamw"
lr = 1e-2
[train]
length = "6st"
global_batch = 8
micro_batch = 2
[checkpoint]
every = "3st"
[track]
every = "1st"
"""
STRATEGIES = {
    "ddp": (),
    "recomputed": ("train.activation_checkpointing=true",),
    "fsdp": ("strategy.use=fsdp",),
    "pipeline": ("strategy.use=pipeline",),
    "zero2": ("strategy.use=deepspeed", "strategy.stage=2"),
    "zero3": ("strategy.use=deepspeed", "strategy.stage=3"),
}


def losses(folder: Path) -> list[float]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in found if "train/loss" in row]


@pytest.mark.slow
def test_all_strategies_train_one_curve_over_a_frozen_bfloat16_base(
    ddpforge: Callable[..., str], texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    save(tmp_path / "base")
    (tmp_path / "tiny.toml").write_text(RECIPE.format(name="single", tokenizer=tokenizer))
    said = ddpforge("run", "tiny.toml", "--set=train.frozen_dtype=fp32", "--set=strategy.use=single")
    assert "frozen: 19,616 parameters in fp32, trained: 896 parameters in fp32" in said
    reference = losses(tmp_path / "runs" / "single")
    assert reference[-1] < 0.95 * reference[0]
    for name, sets in STRATEGIES.items():
        said = ddpforge("run", "tiny.toml", *(f"--set={each}" for each in (f"name={name}", *sets)), ranks=2)
        assert "frozen: 19,616 parameters in bf16, trained: 896 parameters in fp32" in said
        assert losses(tmp_path / "runs" / name) == pytest.approx(reference, rel=1e-5), name


@pytest.mark.parametrize("saved", [pytest.param("all", marks=pytest.mark.slow), "trainable"])  # test_quantize.py has it
def test_a_run_resumes_elsewhere_and_exports_the_saved_dtype(
    ddpforge: Callable[..., str],
    texts: Path,
    tokenizer: Path,
    tmp_path: Path,
    saved: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Checkpoints hold bfloat16; another strategy, number of ranks and dtype continue the same curve."""
    save(tmp_path / "base")
    (tmp_path / "tiny.toml").write_text(RECIPE.format(name="tiny", tokenizer=tokenizer))
    sets = ("--set=strategy.use=fsdp", f"--set=checkpoint.save={saved}")
    ddpforge("run", "tiny.toml", "--set=name=whole", *sets, ranks=2)
    ddpforge("run", "tiny.toml", "--set=train.length=3st", *sets, ranks=2)
    kept = CheckpointReader(next((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*")))
    frozen = [each for name, each in kept.state().model.items() if "lora" not in name]
    assert {each.dtype for each in frozen} == ({torch.bfloat16} if saved == "all" else set())

    ddpforge("run", "tiny.toml", "--set=strategy.use=single", "--set=train.frozen_dtype=fp32", *sets[1:])
    whole, resumed = (tmp_path / "runs" / name for name in ("whole", "tiny"))
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)

    monkeypatch.chdir(tmp_path)
    model, tokens = load(whole).model(), torch.arange(32).view(2, 16) % 18
    exact = causal_lm(pretrained=str(tmp_path / "base"), lora=Adapters(targets=["q_proj", "v_proj"], r=4)).float()
    exact.load_state_dict({name: one.float() for name, one in model.state_dict().items()})
    with torch.no_grad():
        found = model(tokens).logits
        assert found.dtype == torch.float32
        assert torch.equal(found, exact.eval()(tokens).logits)

    ddpforge("export", "runs/whole", "--merge", "--format", "transformers", "-o", "hf")
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    assert merged.keys() == load_file(tmp_path / "base" / "model.safetensors").keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="auto").dtype == torch.bfloat16
