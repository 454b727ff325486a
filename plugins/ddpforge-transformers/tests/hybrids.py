"""Configs of small language models with token mixers that have a state."""

from typing import Any

_BASE = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 400}
_ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = _BASE | _ENDS | {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_FLAT = {key: value for key, value in _SMALL.items() if key != "head_dim"}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 8,
    "linear_key_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 16, "mamba_chunk_size": 16}
_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_CONV = {"layer_types": ["conv", "full_attention"]}
_SCAN = {"state_size": 8, "time_step_rank": 4}

HYBRIDS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _SMALL
    | _LATENT
    | {"layer_types": ["linear_attention", "full_attention"], "n_group": 2, "topk_group": 1, "qk_rope_head_dim": 8},
    "bamba": _FLAT | _MAMBA2 | {"attn_layer_indices": [1]},
    "falcon_h1": _FLAT | _MAMBA2 | {"mamba_d_ssm": 64},
    "falcon_mamba": _BASE | _ENDS | _SCAN,
    "jamba": _FLAT
    | {
        "num_experts": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": _FLAT
    | _LATENT
    | {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "qk_rope_head_dim": 8,
    },
    "lfm2": _FLAT | _CONV,
    "lfm2_moe": _FLAT | _CONV | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "lfm3": _FLAT | _CONV,
    "mamba": _BASE | _ENDS | _SCAN,
    "mamba2": _BASE | _ENDS | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 16, "chunk_size": 16},
    "minimax": _SMALL
    | {"num_local_experts": 4, "layer_types": ["linear_attention", "full_attention"], "block_size": 16},
    "nemotron_h": {key: value for key, value in _SMALL.items() if key != "num_hidden_layers"}
    | {
        "layers_block_type": ["mamba", "attention", "moe"],
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
    },
    "olmo_hybrid": _FLAT | _DELTA,
    "qwen3_5_text": _SMALL | _DELTA,
    "qwen3_5_moe_text": {key: value for key, value in _SMALL.items() if key != "intermediate_size"} | _DELTA | _EXPERTS,
    "qwen3_next": _SMALL | _DELTA | _EXPERTS,
    "recurrent_gemma": _BASE
    | _ENDS
    | {
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "lru_width": 32,
        "attention_window_size": 64,
        "block_types": ["recurrent", "attention"],
    },
    "zamba2": _FLAT
    | {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 16,
        "chunk_size": 16,
        "use_mamba_kernels": False,
    },
    "zaya": {key: value for key, value in _SMALL.items() if key != "intermediate_size"}
    | {"num_experts": 4, "moe_intermediate_size": 32, "router_hidden_size": 16},
    "inkling_text": _SMALL
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 8,
        "d_rel": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "unpadded_vocab_size": 400,
    },
}

MIXING: dict[str, dict[str, Any]] = {
    "granitemoehybrid": _FLAT
    | _MAMBA2
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "rwkv": _BASE,
}
