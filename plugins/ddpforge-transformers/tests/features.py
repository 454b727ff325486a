"""Features of types of models, tried with tiny models of random weights, for `docs/guides/choose-method.md`."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from chats import CHAT, byte_tokenizer
from ddpforge.builtin.models.lora import Adapters
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import SingleRank
from ddpforge.strategies.tensor.sharding_plan import resolve
from hybrids import HYBRIDS, MIXING
from safetensors.torch import save_model
from test_chat_templates import OWN
from test_packing import MIXED_UP, MODELS, SEPARATE
from transformers import AutoModelForCausalLM

from ddpforge_transformers.chat import ChatData
from ddpforge_transformers.models import causal_lm
from ddpforge_transformers.output_layer import check_output_layer
from ddpforge_transformers.packing import PackedData
from ddpforge_transformers.preference_data import PreferenceData
from ddpforge_transformers.preferences import DPO
from ddpforge_transformers.tasks import CausalLM

KINDS: dict[str, dict[str, Any]] = dict(sorted((MODELS | SEPARATE | MIXED_UP | HYBRIDS | MIXING).items()))
ALONE = SingleRank(torch.device("cpu"))
WORLD = World(global_ranks=ALONE, dp_ranks=ALONE, device=ALONE.device, local_rank=0)
LORA = Adapters(targets="all-linear", r=2)
ANSWER = {"prompt": "The cat", "chosen": " sees a dog", "rejected": " sleeps"}


def probed(kind: str, folder: Path) -> dict[str, str]:
    """Returns "yes" for each feature that works with a type of model, else the first line of the reason."""
    folder.mkdir(parents=True, exist_ok=True)
    words = str(byte_tokenizer(folder / "words"))
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 4)
    (folder / "pairs.jsonl").write_text(f"{json.dumps(ANSWER)}\n" * 2)
    chats = ChatData(path=folder / "chats.jsonl", tokenizer=words, max_length=256)
    torch.manual_seed(0)
    found = {}
    for name, probe in PROBES.items():
        try:
            probe(kind, folder, chats)
            found[name] = "yes"
        except Exception as error:  # of any library
            found[name] = f"{type(error).__name__}: {error}".partition("\n")[0][:110]
    return found


def _built(kind: str, **options: Any) -> Any:
    return causal_lm(model_type=kind, options=KINDS[kind], **options)


def _step(model: Any, task: Any, batch: Any) -> None:
    """Raises AssertionError unless every trained weight has a finite gradient, and one is not zero."""
    task.start(model, WORLD)
    task.loss(model, batch)[0].backward()
    gradients = [one.grad for one in model.parameters() if one.requires_grad and one.grad is not None]
    assert gradients
    assert all(one.isfinite().all() for one in gradients)
    assert any(one.any() for one in gradients)


def _full(kind: str, _: Path, chats: ChatData) -> None:
    model, task = _built(kind), CausalLM()
    task.check(model, chats)
    _step(model, task, chats.collate([chats[0], chats[1]]))


def _lora(kind: str, _: Path, chats: ChatData) -> None:
    _step(_built(kind, lora=LORA), CausalLM(), chats.collate([chats[0], chats[1]]))


def _qlora(kind: str, folder: Path, chats: ChatData) -> None:
    _built(kind).bfloat16().save_pretrained(folder / "base")
    model = causal_lm(pretrained=str(folder / "base"), lora=LORA, quantize="nf4", double_quant=True)
    _step(model, CausalLM(), chats.collate([chats[0], chats[1]]))


def _packed(kind: str, _: Path, chats: ChatData) -> None:
    model, data = _built(kind), PackedData(of=chats, block_size=100)
    CausalLM().check(model, data)
    _step(model, CausalLM(), data.collate([data[0]]))


def _chunked(kind: str, _: Path, chats: ChatData) -> None:
    model = _built(kind)
    check_output_layer(model, "loss_chunk")
    _step(model, CausalLM(loss_chunk=16), chats.collate([chats[0], chats[1]]))


def _dpo(kind: str, folder: Path, _: ChatData) -> None:
    data = PreferenceData(path=folder / "pairs.jsonl", tokenizer=str(folder / "words"), max_length=64)
    model, task = _built(kind, lora=LORA), DPO()
    task.check(model, data)
    _step(model, task, data.collate([data[0], data[1]]))


def _tensor(kind: str, *_: Any) -> None:
    model = _built(kind)
    blocks = [block for path in model.repeated for block in model.get_submodule(path).children()]
    resolve(model, None, blocks, ranks=2, sequence=False, split_logits=False)


def _pipeline(kind: str, *_: Any) -> None:
    assert _built(kind).pipeline


def _export(kind: str, folder: Path, chats: ChatData) -> None:
    """Raises AssertionError unless transformers loads the tensors under the names of a checkpoint, with one result."""
    model = _built(kind).eval()
    save_model(model, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = chats[0]["input_ids"][None]
    with torch.no_grad():
        one, other = (each(input_ids=ids, use_cache=False).logits for each in (model, again))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


PROBES: dict[str, Callable[[str, Path, ChatData], None]] = {
    "all weights": _full,
    "LoRA": _lora,
    "QLoRA": _qlora,
    "DPO": _dpo,
    "packed": _packed,
    "loss_chunk": _chunked,
    "tensor": _tensor,
    "pipeline": _pipeline,
    "export": _export,
}


def all_probed(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields the types of models with their features."""
    for kind in KINDS:
        yield kind, probed(kind, folder / kind)


def templates() -> list[str]:
    """Returns the families whose own chat template is learnt, as a test in test_chat_templates.py shows."""
    return [str(one.id) for one in OWN]
