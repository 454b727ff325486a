"""Losses in the output layer have the value and the gradients of the loss of all logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ddpforge.builtin.models.lora import Adapters
from ddpforge.errors import UsageError
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import SingleRank
from tiny import TINY
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ddpforge_transformers import tasks
from ddpforge_transformers.data import TokenizedJSONL
from ddpforge_transformers.models import causal_lm
from ddpforge_transformers.output_layer import OutputLayer, token_log_probabilities
from ddpforge_transformers.tasks import CausalLM

SMALL = TINY["llama"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 8, "tie_word_embeddings": True},
    "gemma": SMALL | {"head_dim": 8},
    "gemma3_text": SMALL | {"head_dim": 8},
    "mistral": SMALL,
    "gpt2": TINY["gpt2"] | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "phi": {key: value for key, value in SMALL.items() if key != "num_key_value_heads"},
}


def built(model_type: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = causal_lm(model_type=model_type, options=FAMILIES[model_type], **options)
    for parameter in model.parameters():  # also biases, which are zero at first
        parameter.data.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.02)
    return model


@pytest.fixture
def batch(samples: Path, tokenizer: Path) -> dict[str, Tensor]:
    data = TokenizedJSONL(path=samples, tokenizer=str(tokenizer), prompt="ask")
    return data.collate([data[number] for number in range(7)])


def gradients(task: CausalLM, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    loss, _ = task.loss(model, batch)
    (loss / 7).backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("phi", "mistral"))) for name in FAMILIES]
)
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}])
def test_loss_and_gradients_equal_those_of_all_logits(
    model_type: str, extra: dict[str, float], batch: dict[str, Tensor]
) -> None:
    whole = gradients(CausalLM(**extra), built(model_type), batch)
    for chunk in (1, 5, 1000):
        task, model = CausalLM(loss_chunk=chunk, **extra), built(model_type)
        task.check(model, None)
        found = gradients(task, model, batch)
        assert found.keys() == whole.keys()
        for name, gradient in whole.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
    plain = built(model_type)(**batch)
    if not extra:
        torch.testing.assert_close(whole["loss"], plain.loss * CausalLM().count(batch))


def test_the_loss_in_bf16_is_summed_in_float32(batch: dict[str, Tensor]) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        whole = gradients(CausalLM(), built("llama"), batch)
        found = gradients(CausalLM(loss_chunk=5), built("llama"), batch)
    assert found["loss"].dtype == whole["loss"].dtype == torch.float32
    torch.testing.assert_close(found["loss"], whole["loss"], rtol=1e-3, atol=0)
    torch.testing.assert_close(found["lm_head.weight"], whole["lm_head.weight"], rtol=0.05, atol=0.01)


def test_the_model_still_returns_logits_and_saves_the_same_weights(batch: dict[str, Tensor], tmp_path: Path) -> None:
    task, model = CausalLM(loss_chunk=4), built("llama").eval()
    before = model(input_ids=batch["input_ids"]).logits
    names = list(model.state_dict())
    assert task.loss(model, batch)[1] is None
    torch.testing.assert_close(model(input_ids=batch["input_ids"]).logits, before, rtol=0, atol=0)
    assert list(model.state_dict()) == names
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=batch["input_ids"]).logits, before)


def test_a_compiled_model_is_compiled_once(batch: dict[str, Tensor]) -> None:
    whole = gradients(CausalLM(), built("llama"), batch)
    task, model = CausalLM(loss_chunk=5), built("llama")
    model.compile(backend="eager")
    found = gradients(task, model, batch)
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (5, 5):
            task.loss(model, {name: tensor.roll(length, 0) for name, tensor in batch.items()})


def test_no_tensor_has_the_size_of_all_logits(batch: dict[str, Tensor]) -> None:
    largest = {}
    for name, task in (("whole", CausalLM()), ("chunks", CausalLM(loss_chunk=4))):
        model = causal_lm(model_type="llama", options=SMALL | {"vocab_size": 5000})
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            task.loss(model, batch)
        largest[name] = max(sizes)
    assert largest["whole"] == batch["input_ids"].numel() * 5000
    assert largest["chunks"] == 5000 * 32, "the output layer's gradient"


def test_adapters_are_trained_and_an_adapted_or_quantised_output_layer_is_refused(batch: dict[str, Tensor]) -> None:
    def adapted() -> nn.Module:
        model = built("llama", lora=Adapters(targets=["q_proj"], r=2))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.constant_(parameter, 0.1)
        return model

    whole, found = gradients(CausalLM(), adapted(), batch), gradients(CausalLM(loss_chunk=3), adapted(), batch)
    assert all("lora_" in name for name in found if name != "loss")
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-5)

    task = CausalLM(loss_chunk=3)
    with pytest.raises(ValueError, match=r"must be a torch.nn.Linear .* neither adapt nor quantise"):
        task.check(built("llama", lora=Adapters(targets=["lm_head"], r=2)), None)
    model: Any = built("llama")
    model.lm_head = nn.Linear(32, 32)
    model.lm_head.weight = nn.Parameter(torch.zeros(512, 1, dtype=torch.uint8), requires_grad=False)  # as in 4 bits
    with pytest.raises(ValueError, match="but it is a Linear of uint8"):
        task.check(model, None)


@pytest.mark.parametrize(
    ("model_type", "options", "key"),
    [
        ("gemma2", {"head_dim": 8}, "final_logit_softcapping"),
        ("cohere", {}, "logit_scale"),
        ("granite", {"logits_scaling": 2.0}, "logits_scaling"),
    ],
)
def test_models_that_change_their_logits_are_refused(
    model_type: str, options: dict[str, Any], key: str, batch: dict[str, Tensor]
) -> None:
    model = causal_lm(model_type=model_type, options=SMALL | options)
    task = CausalLM(loss_chunk=3)
    with pytest.raises(ValueError, match=f"changes its logits after the output layer \\(`{key}` of its config\\)"):
        task.check(model, None)
    # The model itself is compared, too: its config may have another key for it.
    with pytest.raises(UsageError, match="changes its logits after the output layer"):
        task.loss(model, batch)


def test_options_that_cannot_work_are_refused() -> None:
    from ddpforge.builtin.metrics.classification import Accuracy

    with pytest.raises(ValueError, match="metrics need the logits, which loss_chunk does not compute"):
        CausalLM(loss_chunk=3, metrics=[Accuracy()])
    assert CausalLM(z_loss=1e-4).finish({"loss": 1.0}) == {"loss": 1.0}
    assert CausalLM(loss_chunk=3).finish({"loss": 0.0}) == {"loss": 0.0, "perplexity": 1.0}


def test_the_kernel_of_liger_is_refused_on_cpus_and_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs a package that is not installed: pip install liger-kernel"):
        CausalLM(loss_kernel="liger")
    monkeypatch.setattr(tasks, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="remove loss_chunk or loss_kernel"):
        CausalLM(loss_kernel="liger", loss_chunk=3)
    alone = SingleRank(torch.device("cpu"))
    world = World(global_ranks=alone, dp_ranks=alone, device=alone.device, local_rank=0)
    with pytest.raises(UsageError, match="runs on GPUs of CUDA, but this rank computes on cpu"):
        CausalLM(loss_kernel="liger").start(built("llama"), world)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("extra", [{}, {"label_smoothing": 0.1, "z_loss": 1e-2}])
def test_the_kernel_of_liger_has_the_loss_and_gradients_of_all_logits(
    extra: dict[str, float], batch: dict[str, Tensor]
) -> None:
    pytest.importorskip("liger_kernel")
    batch = {name: tensor.cuda() for name, tensor in batch.items()}
    whole = gradients(CausalLM(**extra), built("llama").cuda(), batch)
    found = gradients(CausalLM(**extra, loss_kernel="liger"), built("llama").cuda(), batch)
    for name, gradient in whole.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)


def test_log_probabilities_of_tokens_equal_those_of_all_logits(batch: dict[str, Tensor]) -> None:
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    targets = batch["labels"][:, 1:]
    found = []
    for chunked in (True, False):
        model = built("gpt2").eval()
        if chunked:
            each = token_log_probabilities(OutputLayer(model), model, batch, chunk=5)
        else:
            known = targets.clamp(min=0)[..., None]
            each = model(**inputs).logits[:, :-1].log_softmax(-1).gather(-1, known).squeeze(-1) * (targets != -100)
        torch.nn.functional.logsigmoid(each.sum(1)[:3] - each.sum(1)[3:6]).sum().backward()
        found.append([each.detach(), *(p.grad for p in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
