"""Segments of models for pipelines."""

from typing import Any

import pytest
import torch
from ddpforge.strategies.pipeline.segments import declared_segments
from tiny import TINY

from ddpforge_transformers.models import causal_lm

QWEN = TINY["llama"] | {"num_hidden_layers": 3}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", TINY["llama"] | {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", QWEN),
    "qwen2, sliding": ("qwen2", QWEN | {"use_sliding_window": True, "sliding_window": 2, "max_window_layers": 1}),
    "qwen3": ("qwen3", QWEN | {"head_dim": 8}),
    "gpt2": ("gpt2", TINY["gpt2"]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", ["full", "padded", "packed"])
def test_segments_compute_the_forward_pass_bit_by_bit(name: str, rows: str) -> None:
    kind, options = MODELS[name]
    model: Any = causal_lm(model_type=kind, options=options).eval()
    batch = {"input_ids": torch.arange(14).reshape(2, 7) + 2}
    if rows == "packed":
        batch["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4, 0]])
    if rows == "padded":
        batch["attention_mask"] = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    steps = declared_segments(model)
    found: Any = steps[0].call(**batch, use_cache=False)
    for step in steps[1:]:
        found = step.call(*(found if isinstance(found, tuple) else (found,)))
    assert torch.equal(found.logits, model(**batch, use_cache=False).logits)
    assert len(steps) == options.get("num_hidden_layers", options.get("n_layer")) + 2


def test_segments_refuse_a_mask_with_positions() -> None:
    steps = declared_segments(causal_lm(model_type="llama", options=TINY["llama"]))
    ids = torch.arange(7)[None]
    with pytest.raises(ValueError, match="either attention_mask or position_ids"):
        steps[0].call(input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids)
