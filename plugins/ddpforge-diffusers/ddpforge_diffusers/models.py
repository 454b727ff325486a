"""UNets and diffusion transformers of diffusers: from a config with random weights, or from saved weights."""

import inspect
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import diffusers
import torch
from ddpforge.builtin.models.lora import Adapters
from ddpforge.errors import UsageError, not_there
from diffusers.models.embeddings import LabelEmbedding
from diffusers.models.modeling_utils import ModelMixin
from pydantic import Field
from torch import Tensor, nn

__all__ = ["class_rows", "denoise", "diffusers_model", "forward_parameters"]

ddpforge_plugin_api = 3

_CALLED_WITH = ("timestep", "class_labels", "encoder_hidden_states", "pooled_projections")
_TESTED = ("UNet2DModel", "UNet2DConditionModel", "DiTTransformer2DModel", "SD3Transformer2DModel")


def diffusers_model(
    *,
    arch: Annotated[
        str | None,
        Field(max_length=200, description='Class of diffusers, e.g. "UNet2DModel" or "DiTTransformer2DModel".'),
    ] = None,
    options: Annotated[
        Mapping[str, Any], Field(description="Keyword arguments of the class, e.g. { sample_size = 32 }.")
    ] = {},
    pretrained: Annotated[
        Path | None, Field(description="Folder in which diffusers saved a model or a pipeline, in place of `arch`.")
    ] = None,
    subfolder: Annotated[
        str | None, Field(max_length=200, description='Folder of the model within a pipeline, e.g. "unet".')
    ] = None,
    lora: Annotated[
        Adapters | None,
        Field(description='Train only adapters: options of ddpforge\'s `lora`, e.g. { targets = ["to_q", "to_v"] }.'),
    ] = None,
) -> nn.Module:
    """Builds a model that takes noisy samples [B, C, H, W] and times [B], for `flow_matching` and `ddpm`.

    Weights are float32. Label dropout within the model is off: the task drops labels, by numbers of each sample's own.

    Raises ValueError for unknown classes and options, and UsageError for a folder without such a model.
    """
    if (arch is None) == (pretrained is None):
        raise ValueError("set either `arch` (random weights) or `pretrained`")
    if pretrained is not None:
        if options:
            raise ValueError("options are for `arch`: the config of `pretrained` has its own")
        model = _saved(pretrained, subfolder)
    else:
        if subfolder is not None:
            raise ValueError("subfolder is for `pretrained`")
        model = _new(str(arch), options)
    for module in model.modules():
        if isinstance(module, LabelEmbedding):
            module.dropout_prob = 0.0  # drawn for a whole batch, so that the loss would depend on the ranks
    if (blocks := _blocks(model)) is not None:
        model.repeated = blocks  # type: ignore[assignment]  # any attribute may be set on a module
    return lora.put_into(model) if lora else model


def forward_parameters(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the model's forward pass by name; the first is the noisy sample."""
    return inspect.signature(model.forward).parameters


def class_rows(model: nn.Module) -> int:
    """Returns the number of rows of the model's embedding of classes; 0 if it has none."""
    for name, module in model.named_modules():
        if isinstance(module, LabelEmbedding):
            return int(module.embedding_table.num_embeddings)
        if name == "class_embedding" and isinstance(module, nn.Embedding):
            return int(module.num_embeddings)
    return 0


def denoise(model: nn.Module, noisy: Tensor, times: Tensor, conditions: Mapping[str, Tensor]) -> Tensor:
    """Returns the model's prediction for noisy samples [B, C, H, W] at `times` [B], as float32."""
    found: Tensor = model(noisy, timestep=times, return_dict=False, **conditions)[0]
    return found.float()


def _class(name: str) -> Any:
    """Returns a class of diffusers; raises ValueError if there is none, or if the tasks cannot call it."""
    models = {
        one for one in dir(diffusers) if ("Model" in one and one.startswith(("UNet", "UVit"))) or "Transformer" in one
    }
    kind: Any = getattr(diffusers, name, None) if name in models else None
    is_model = isinstance(kind, type) and issubclass(kind, ModelMixin)
    if not is_model:
        near = get_close_matches(name, models, n=2) or list(_TESTED)
        raise ValueError(
            f"arch: diffusers {diffusers.__version__} has no UNet or transformer `{name}`; did you mean"
            f" {' or '.join(f'`{one}`' for one in near)}?"
        )
    given = list(inspect.signature(kind.forward).parameters.values())[1:]
    needed = [one.name for one in given[1:] if one.default is one.empty and one.name not in _CALLED_WITH]
    names = {one.name for one in given}
    if given[0].name not in ("sample", "hidden_states") or "timestep" not in names or needed or "img_ids" in names:
        raise ValueError(
            f"arch: the tasks cannot call `{name}`, whose forward pass takes {', '.join(one.name for one in given)};"
            f" tested are {', '.join(_TESTED)}"
        )
    return kind


def _new(arch: str, options: Mapping[str, Any]) -> nn.Module:
    """Builds a model with random weights; raises ValueError for options that do not exist or do not fit."""
    kind = _class(arch)
    known = [name for name in inspect.signature(kind.__init__).parameters if name not in ("self", "kwargs")]
    for key in options:
        if key not in known:
            near = get_close_matches(key, known, n=3)
            hint = f"; did you mean {' or '.join(f'`{one}`' for one in near)}?" if near else ""
            raise ValueError(f"options: `{arch}` has no option `{key}`{hint}")
    try:
        model: nn.Module = kind(**options)
    except Exception as error:  # constructors raise many classes, without a common base
        raise ValueError(f"options: `{arch}` refuses {dict(options)}: {type(error).__name__}: {error}") from error
    return model


def _saved(folder: Path, subfolder: str | None) -> nn.Module:
    """Loads a saved model; raises UsageError if there is none, or if its weights do not fit its config."""
    place = folder / subfolder if subfolder else folder
    config = place / "config.json"
    if not config.is_file():
        inner = sorted(one.parent.name for one in folder.glob("*/config.json"))
        hints = [f'set subfolder = "{name}"' for name in inner] if not subfolder else []
        raise UsageError(
            f"pretrained: {place} has no config.json; expected a folder that `save_pretrained` of diffusers wrote",
            hints=[*hints, *(not_there(folder) if not folder.is_dir() else ())],
            key="pretrained",
        )
    try:
        name = json.loads(config.read_text(encoding="utf-8"))["_class_name"]
        kind = _class(str(name))
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise UsageError(
            f"pretrained: {config} names no model that the tasks can call: {error}", key="pretrained"
        ) from error
    try:
        model, found = kind.from_pretrained(
            place, use_safetensors=True, local_files_only=True, torch_dtype=torch.float32, output_loading_info=True
        )
    except Exception as error:  # diffusers raises many classes, without a common base
        raise UsageError(
            f"pretrained: diffusers cannot load {place}: {str(error).splitlines()[0]}", key="pretrained"
        ) from error
    for kind_of_fault in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if found.get(kind_of_fault):
            one = sorted(map(str, found[kind_of_fault]))[0]
            fault = kind_of_fault.replace("_keys", "")
            raise UsageError(
                f"pretrained: the weights in {place} do not fit its config: `{one}` is {fault}", key="pretrained"
            )
    saved: nn.Module = model
    return saved


def _blocks(model: nn.Module) -> list[str] | None:
    """Returns the paths of the lists of repeated blocks, or None if ddpforge finds them itself."""
    if type(model).__name__ != "DiTTransformer2DModel":
        return None
    # Its output layer calls the embedding of times in block 0, outside of that block. So the units of sharding and
    # recomputation are the attention, the norms and the MLP of the other blocks, and block 0 belongs to the rest.
    return [
        f"transformer_blocks.{number}" for number in range(1, len(model.get_submodule("transformer_blocks")._modules))
    ]
