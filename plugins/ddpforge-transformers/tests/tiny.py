"""Configs of tiny models for fast tests."""

from typing import Any

TINY: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "pad_token_id": 0,
    },
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 32, "bos_token_id": 1, "eos_token_id": 1},
    "bert": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 32,
    },
}
