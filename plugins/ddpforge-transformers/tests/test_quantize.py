"""Adapters on a quantized base (QLoRA)."""

import copy
import gc
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.builtin.models.lora import Adapters
from ddpforge.builtin.models.quantized import QuantizedLinear
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.training.contract import count_parameters
from peft import PeftModel
from safetensors.torch import load_file
from test_frozen import RECIPE, STRATEGIES, losses, results, save
from torch import nn
from transformers import AutoModelForCausalLM

from ddpforge_transformers.models import causal_lm

pytest.importorskip("bitsandbytes")
TARGETS = ["q_proj", "v_proj"]
PISSA, LOFTQ = (Adapters(targets=TARGETS, r=4, init=init) for init in ("pissa", "loftq"))
QUANTIZE = {
    "nf4": 'quantize = "nf4"',
    "double": 'quantize = "nf4"\ndouble_quant = true',
    "int8": 'quantize = "int8"',
}


def recipe(tokenizer: Path, form: str = "double", lora: str = "") -> str:
    text = RECIPE.format(name="tiny", tokenizer=tokenizer).replace("[data.train]", f"{QUANTIZE[form]}\n[data.train]")
    return text.replace("r = 4", f"r = 4{lora}")


def quantized(folder: Path, **options: Any) -> Any:
    return causal_lm(pretrained=str(folder), lora=Adapters(targets=TARGETS, r=4), **options)


def test_linear_layers_of_blocks_are_quantized_and_the_rest_is_not(tmp_path: Path) -> None:
    model = quantized(save(tmp_path / "base"), quantize="nf4")
    kinds = {name: type(module) for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    layers = {name for name, kind in kinds.items() if kind is QuantizedLinear}
    assert len(layers) == 2 * 7
    assert {name.split(".")[1] for name in layers} == {"layers"}
    assert kinds["lm_head"] is nn.Linear
    assert count_parameters(model).frozen == {"nf4": 2 * 7_680, "bf16": 2 * 64 * 32 + 5 * 32}


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="lists mapped files, as Linux does")
def test_the_file_of_the_saved_weights_is_released(tmp_path: Path) -> None:
    """While it is mapped, its pages count as memory of the process."""
    folder = save(tmp_path / "base")
    plain = causal_lm(pretrained=str(folder), lora=Adapters(targets=TARGETS, r=4))
    assert str(folder) in Path("/proc/self/maps").read_text()
    del plain
    gc.collect()
    model = quantized(folder, quantize="nf4")
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert count_parameters(model).frozen["nf4"] == 2 * 7_680


@pytest.mark.parametrize("dora", [None, True])
@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_adapters_train_as_on_the_unpacked_weights(form: Any, dora: bool | None, tmp_path: Path) -> None:
    """Compares with peft's layers on nn.Linear layers with the unpacked weights."""
    folder = save(tmp_path / "base", dtype=torch.float32)
    torch.manual_seed(1)
    adapters = Adapters(targets=TARGETS, r=4, dora=dora)
    model: Any = causal_lm(pretrained=str(folder), lora=adapters, quantize=form)
    plain = copy.deepcopy(model)
    for name, module in list(plain.named_modules()):
        if isinstance(module, QuantizedLinear):
            layer = nn.Linear(module.in_features, module.out_features, bias=False)
            layer.weight = nn.Parameter(module.weight.detach(), requires_grad=False)
            plain.set_submodule(name, layer)
    (logits, gradients), (wanted, others) = results(model), results(plain)
    torch.testing.assert_close(logits, wanted, rtol=1e-6, atol=1e-7)
    assert gradients.keys() == others.keys()
    for name, value in others.items():
        torch.testing.assert_close(gradients[name], value, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_loftq_restores_as_much_of_the_weights_as_the_rank_allows(form: Any, tmp_path: Path) -> None:
    """Compares with the singular values of the quantization error: Eckart and Young (1936)."""
    folder = save(tmp_path / "base", dtype=torch.float32)
    model: Any = causal_lm(pretrained=str(folder), lora=LOFTQ, quantize=form)
    saved: Any = causal_lm(pretrained=str(folder))
    layers = [name for name, module in model.named_modules() if isinstance(module, QuantizedLinear)]
    adapted = [name.removesuffix(".base_layer") for name in layers if name.endswith(".base_layer")]
    assert adapted
    for name in adapted:
        layer, weight = model.get_submodule(name), saved.get_submodule(name).weight.detach()
        update = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        lost = torch.linalg.svdvals(weight - layer.base_layer.weight)
        left = (weight - layer.base_layer.weight - update).norm()
        torch.testing.assert_close(left, lost[4:].norm(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": None, "quantize": "nf4"}, 'quantize = "nf4" needs `lora`: quantized weights cannot be trained'),
        ({"weights": False, "quantize": "nf4"}, 'quantize = "nf4" needs the saved weights of `pretrained`'),
        ({"lora": PISSA, "quantize": "nf4"}, 'init = "pissa" changes the weights of adapted layers'),
        ({"lora": PISSA, "weights": False}, 'lora.init = "pissa" needs the saved weights of `pretrained`'),
        ({"lora": LOFTQ}, 'init = "loftq" needs quantized layers, and `model.layers.0.'),
        ({"double_quant": True}, 'double_quant is for quantize = "nf4"'),
        ({"double_quant": False, "quantize": "int8"}, 'double_quant is for quantize = "nf4"'),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        causal_lm(**{"pretrained": str(save(tmp_path / "base")), "lora": Adapters(targets=TARGETS)} | options)


@pytest.mark.parametrize("form", ["nf4", "int8"])
@pytest.mark.parametrize("name", ["packed", "absmax"])
def test_quantized_weights_cannot_be_trained(tmp_path: Path, form: Any, name: str) -> None:
    adapters = Adapters(targets=["q_proj"], train=[f"*up_proj.{name}"])
    said = f"matches `model.layers.0.mlp.up_proj.{name}`, but quantized weights cannot be trained"
    with pytest.raises(ValueError, match=re.escape(said)):
        causal_lm(pretrained=str(save(tmp_path / "base")), lora=adapters, quantize=form)


def test_a_model_without_linear_layers_is_refused(tmp_path: Path) -> None:
    said = "finds no nn.Linear in the blocks of GPT2LMHeadModel, which has Conv1D"
    with pytest.raises(ValueError, match=re.escape(said)):
        causal_lm(pretrained=str(save(tmp_path / "base", "gpt2")), lora=Adapters(targets=["c_attn"]), quantize="nf4")


# ---------------------------------------------------------------------------------------------- runs
@pytest.mark.slow
@pytest.mark.parametrize(("form", "strategies"), [("double", list(STRATEGIES)), ("int8", ["fsdp", "zero3"])])
def test_all_strategies_train_one_curve_over_a_quantized_base(
    ddpforge: Callable[..., str], texts: Path, tokenizer: Path, tmp_path: Path, form: str, strategies: list[str]
) -> None:
    save(tmp_path / "base")
    (tmp_path / "tiny.toml").write_text(recipe(tokenizer, form))
    said = ddpforge("run", "tiny.toml", "--set=name=single", "--set=strategy.use=single")
    kind = form.replace("double", "nf4")
    assert f"frozen: 4,256 parameters in bf16 and 15,360 parameters in {kind}, trained: 896 parameters in fp32" in said
    reference = losses(tmp_path / "runs" / "single")
    for name in strategies:
        sets = STRATEGIES[name]
        ddpforge("run", "tiny.toml", *(f"--set={each}" for each in (f"name={name}", *sets)), ranks=2)
        assert losses(tmp_path / "runs" / name) == pytest.approx(reference, rel=1e-5), name


@pytest.mark.parametrize("saved", ["all", pytest.param("trainable", marks=pytest.mark.slow)])  # test_frozen.py has it
def test_a_run_resumes_elsewhere_and_its_exports_are_loaded(
    ddpforge: Callable[..., str], texts: Path, tokenizer: Path, tmp_path: Path, saved: str
) -> None:
    """transformers loads the merged model in bfloat16, and peft the adapters (DoRA) on the base."""
    save(tmp_path / "base")
    (tmp_path / "tiny.toml").write_text(recipe(tokenizer, lora=", dora = true, rslora = true"))
    sets = (f"--set=checkpoint.save={saved}",)
    ddpforge("run", "tiny.toml", "--set=name=whole", "--set=strategy.use=single", *sets)
    ddpforge("run", "tiny.toml", "--set=train.length=3st", "--set=strategy.use=fsdp", *sets, ranks=2)
    kept = CheckpointReader(next((tmp_path / "runs" / "tiny" / "checkpoints").glob("step-*"))).state().model
    packed = [each.dtype for name, each in kept.items() if name.endswith("packed")]
    assert packed == ([torch.uint8] * 14 if saved == "all" else [])
    ddpforge("run", "tiny.toml", "--set=strategy.use=single", *sets)
    whole, resumed = (tmp_path / "runs" / name for name in ("whole", "tiny"))
    assert losses(resumed) == pytest.approx(losses(whole), rel=1e-5)

    ddpforge("export", "runs/whole", "--merge", "--format", "transformers", "-o", "hf")
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    base = load_file(tmp_path / "base" / "model.safetensors")
    assert {name: (x.dtype, x.shape) for name, x in merged.items()} == {n: (x.dtype, x.shape) for n, x in base.items()}
    ids = torch.arange(20)[None] % 18
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)(ids).logits

    # The same model by peft: the unpacked base, and the exported adapters.
    untrained: Any = quantized(tmp_path / "base", quantize="nf4", double_quant=True)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    for name, module in untrained.named_modules():
        if isinstance(module, QuantizedLinear):
            plain.get_submodule(name.replace(".base_layer", "")).weight.data = module.weight.detach()
    ddpforge("export", "runs/whole", "--format", "peft", "-o", "adapters")
    adapted = PeftModel.from_pretrained(plain, tmp_path / "adapters")(ids).logits
    torch.testing.assert_close(found, adapted, rtol=0.02, atol=0.02 * adapted.abs().max().item())  # merged in bfloat16


@pytest.mark.slow
def test_memory_by_plan_and_measured_in_a_step(
    ddpforge: Callable[..., str], texts: Path, tokenizer: Path, tmp_path: Path
) -> None:
    """Compares a small Llama (85 M weights), whose embeddings do not dominate, on three kinds of bases."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    model: Any = causal_lm(model_type="llama", options={**sizes, "vocab_size": 512})
    model.bfloat16().save_pretrained(tmp_path / "base")
    text = RECIPE.format(name="tiny", tokenizer=tokenizer).replace(
        "global_batch = 8\nmicro_batch = 2", "global_batch = 1"
    )
    (tmp_path / "tiny.toml").write_text(text.replace('"6st"', '"3st"'))
    peaks = {}
    for name, key in (("fp32", "train.frozen_dtype=fp32"), ("bf16", "train.seed=0"), ("nf4", "model.quantize=nf4")):
        said = ddpforge("plan", "tiny.toml", f"--set={key}", "--json")
        planned = json.loads(next(line for line in said.splitlines() if line.startswith("[{")))[0]["peak"]
        ddpforge("run", "tiny.toml", f"--set=name={name}", "--set=track.memory_check=on", f"--set={key}")
        peaks[name] = json.loads((tmp_path / "runs" / name / "memory.json").read_text())["measured"]["peak"]
        assert planned == pytest.approx(peaks[name], rel=0.02)
    assert peaks["bf16"] < 0.55 * peaks["fp32"]
    assert peaks["nf4"] < 0.20 * peaks["fp32"]
