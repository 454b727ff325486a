"""Checks before training that model, data and condition fit together."""

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from ddpforge_diffusers.models import class_rows, forward_parameters

__all__ = ["Condition", "check_fit"]

Condition = Literal["none", "label", "embeddings"]


def check_fit(model: nn.Module, data: Any, *, condition: Condition, dropout: float, samples: bool) -> None:
    """Raises ValueError for data without seeds, and for a model that does not fit the data or the condition."""
    if not getattr(data, "gives_seeds", False):
        raise ValueError(
            f"{type(data).__name__} has no seeds for times and noise; use the dataset `diffusion_data`:"
            ' data.train = { use = "diffusion_data", of = { … } }'
        )
    parameters = forward_parameters(model)
    if "timestep" not in parameters or not hasattr(model, "config"):
        raise ValueError(
            f'the task needs a model of diffusers, not {type(model).__name__}; set model.use = "diffusers"'
        )
    sample = data.example["sample"]
    _check_shape(model.config, type(model).__name__, list(sample.shape))
    if condition == "label":
        _check_labels(model, data, dropout)
    elif class_rows(model):
        raise ValueError(f'{type(model).__name__} takes classes; set task.condition = "label"')
    _check_embeddings(model, data.example, condition)
    if samples:
        if data.range == "any" or len(sample) not in (1, 3):
            raise ValueError(
                'samples: pictures need 1 or 3 channels and range = "unit" or "symmetric", but the data has'
                f' {len(sample)} channels and range = "{data.range}";'
                " remove `samples`, and decode latents after the training"
            )
        if condition == "embeddings":
            raise ValueError('samples: pictures can be shown for condition = "none" and "label" only')


def _check_shape(config: Any, name: str, shape: list[int]) -> None:
    """Raises ValueError for samples of another shape than the model's."""
    channels, height, width = shape
    given = int(config.in_channels)
    returned = int(config.get("out_channels") or given)
    if given != channels:
        raise ValueError(f"{name} has in_channels = {given}, but samples are {shape}: [C, H, W]")
    if returned != channels:
        raise ValueError(
            f"{name} has out_channels = {returned}; the task needs as many as in_channels: {channels} (a learned"
            " variance is not supported)"
        )
    if "patch_size" in config:
        size, patch = int(config.sample_size), int(config.patch_size)
        if height != width or height != size:
            raise ValueError(f"{name} has sample_size = {size}, but samples are {shape}: [C, H, W]")
        if size % patch:
            raise ValueError(f"{name} has sample_size = {size}, which patch_size = {patch} does not divide")
    elif "block_out_channels" in config:
        factor = 2 ** (len(config.block_out_channels) - 1)
        if height % factor or width % factor:
            raise ValueError(
                f"{name} has {len(config.block_out_channels)} levels, so height and width must be multiples of"
                f" {factor}, but samples are {shape}: [C, H, W]"
            )


def _check_labels(model: nn.Module, data: Any, dropout: float) -> None:
    name, rows = type(model).__name__, class_rows(model)
    if "label" not in data.example:
        raise ValueError('condition = "label", but samples have no label; use a dataset of pairs (tensor, class)')
    if not rows:
        raise ValueError(
            f'condition = "label", but {name} has no embedding of classes; set options.num_class_embeds (UNets), or'
            ' condition = "none"'
        )
    if data.classes is None:
        raise ValueError('condition = "label" needs the number of classes: set `classes` of diffusion_data')
    needed = data.classes + bool(dropout)
    if rows < needed:
        extra = ", and one label for samples without a class (dropout)" if dropout else ""
        raise ValueError(
            f"{name} has {rows} labels, but the data has {data.classes} classes{extra}: {needed} are needed"
        )


def _check_embeddings(model: nn.Module, example: Mapping[str, Tensor], condition: Condition) -> None:
    name, parameters, config = type(model).__name__, forward_parameters(model), getattr(model, "config", {})
    needs = {
        key: parameter
        for key, parameter in (("embeddings", "encoder_hidden_states"), ("pooled", "pooled_projections"))
        if parameter in parameters
    }
    if condition != "embeddings":
        if "embeddings" in needs:
            raise ValueError(f'{name} takes embeddings of text; set task.condition = "embeddings"')
        return
    if "embeddings" not in needs:
        raise ValueError(f'condition = "embeddings", but {name} does not take encoder_hidden_states')
    for key in needs:
        if key not in example:
            raise ValueError(f"{name} takes `{key}`, but samples have the keys {', '.join(sorted(example))}")
    sizes = {
        "embeddings": config.get("joint_attention_dim") or config.get("cross_attention_dim"),
        "pooled": config.get("pooled_projection_dim"),
    }
    for key in needs:
        if isinstance(sizes[key], int) and sizes[key] != example[key].shape[-1]:
            raise ValueError(
                f"{name} takes `{key}` of size {sizes[key]}, but those of the data have {example[key].shape[-1]}"
            )
