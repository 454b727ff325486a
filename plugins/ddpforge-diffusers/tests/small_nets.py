"""Small models and recipes for the tests."""

from typing import Any

DIT: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "num_layers": 3,
    "in_channels": 1,
    "sample_size": 8,
    "patch_size": 2,
    "num_embeds_ada_norm": 10,
}
UNET: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 1,
    "out_channels": 1,
    "layers_per_block": 1,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "AttnDownBlock2D"],
    "up_block_types": ["AttnUpBlock2D", "UpBlock2D"],
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}
UNET_TEXT: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "cross_attention_dim": 12,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
}
SD3: dict[str, Any] = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "joint_attention_dim": 12,
    "caption_projection_dim": 16,
    "pooled_projection_dim": 6,
    "pos_embed_max_size": 8,
}


def table(options: dict[str, Any]) -> str:
    """Returns an inline table of TOML."""
    return "{ " + ", ".join(f"{key} = {str(value).replace(chr(39), chr(34))}" for key, value in options.items()) + " }"


RECIPE = f"""
recipe = 2
name = "flow"
[model]
use = "diffusers"
arch = "DiTTransformer2DModel"
options = {table(DIT)}
[data.train]
use = "diffusion_data"
of = {{ use = "digits", split = "train", samples = 96 }}
[data.sampler]
use = "sequential"
[task]
use = "flow_matching"
condition = "label"
dropout = 0.2
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "10st"
global_batch = 8
seed = 3
[checkpoint]
every = "10st"
[track]
every = "1st"
"""
