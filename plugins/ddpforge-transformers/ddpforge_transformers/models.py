"""Models of transformers: from a config with random weights, or from saved weights."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from ddpforge.builtin.models.lora import Adapters
from pydantic import Field
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from ddpforge_transformers.stages import say_steps

__all__ = ["causal_lm", "masked_lm", "sequence_classification"]

ddpforge_plugin_api = 3

_ModelType = Annotated[
    str | None, Field(description='Type of a model with random weights, e.g. "llama"; or set `pretrained`.')
]
_Pretrained = Annotated[
    str | None,
    Field(description="Folder in which transformers saved a model, or a name on the hub to download."),
]
_Weights = Annotated[bool, Field(description="False: uses only the config of `pretrained`; weights are random.")]
_Options = Annotated[Mapping[str, Any], Field(description="Keys of the config, e.g. { hidden_size = 64 }.")]
_Attention = Annotated[
    Literal["eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention"] | None,
    Field(description="Implementation of attention; absent: the default of transformers."),
]
_LoRA = Annotated[
    Adapters | None,
    Field(description='Train only adapters: options of ddpforge\'s `lora`, e.g. { targets = ["q_proj"] }.'),
]
_OWNED = {"model_type", "num_labels", "id2label", "label2id", "dtype", "torch_dtype", "architectures"}


def causal_lm(
    *,
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a causal language model, for this package's task and data.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = _config(model_type, pretrained, options)
    model = _model(AutoModelForCausalLM, config, pretrained if weights else None, attention)
    say_steps(model)
    return _adapted(model, lora)


def masked_lm(
    *,
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a masked language model, for ddpforge's task `masked_lm`; set its `mask_token` to that of the tokenizer.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = _config(model_type, pretrained, options)
    return _adapted(_model(AutoModelForMaskedLM, config, pretrained if weights else None, attention), lora)


def sequence_classification(
    *,
    classes: Annotated[int, Field(ge=2, le=2**20, description="Number of classes.")],
    model_type: _ModelType = None,
    pretrained: _Pretrained = None,
    weights: _Weights = True,
    options: _Options = {},
    attention: _Attention = None,
    lora: _LoRA = None,
) -> nn.Module:
    """Builds a text classifier with `classes` classes. The head is new if the saved head has another size.

    Raises ValueError for unknown types and keys, if there is no saved model, and for adapters that do not fit.
    """
    config = _config(model_type, pretrained, options)
    config.num_labels = classes
    model = _model(AutoModelForSequenceClassification, config, pretrained if weights else None, attention)
    model.outputs = classes  # type: ignore[assignment]  # any attribute may be set on a module
    return _adapted(model, lora)


_builders: tuple[Any, ...] = (causal_lm, masked_lm, sequence_classification)
for _builder in _builders:
    _builder.export_format = "transformers"  # of `ddpforge export` into a folder


def _config(model_type: str | None, pretrained: str | None, options: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns the config; raises ValueError for unknown keys, which transformers accepts silently."""
    if (model_type is None) == (pretrained is None):
        raise ValueError("set either `model_type` (random weights) or `pretrained`")
    if pretrained is not None:
        known = type(_saved(AutoConfig, pretrained))
    elif model_type in CONFIG_MAPPING:
        known = CONFIG_MAPPING[model_type]
    else:
        raise ValueError(
            f"transformers has no model_type `{model_type}`{_near(str(model_type), CONFIG_MAPPING.keys())}"
        )

    keys = {*known().to_dict(), *known.attribute_map, *(field.name for field in _fields(known))} - _OWNED
    for key in options:
        if key in _OWNED:
            raise ValueError(f"options.{key} cannot be set: other options or the recipe determine it")
        if key not in keys:
            raise ValueError(f"the config of {known.model_type} has no key `{key}`{_near(key, keys)}")
    try:
        return _saved(AutoConfig, pretrained, **options) if pretrained is not None else known(**options)
    except Exception as error:  # configs raise their own classes, without a common base
        raise ValueError(f"{known.model_type} refuses its options {dict(options)}: {error}") from error


def _model(auto: Any, config: PreTrainedConfig, pretrained: str | None, attention: str | None) -> nn.Module:
    """Builds the model with float32 weights, which strategies expect, whatever the precision of training."""
    how: dict[str, Any] = {"dtype": torch.float32} | ({"attn_implementation": attention} if attention else {})
    try:
        if pretrained is not None:
            model: nn.Module = _saved(auto, pretrained, config=config, ignore_mismatched_sizes=True, **how)
        else:
            model = auto.from_config(config, **how)
    except (ValueError, ImportError) as error:
        raise ValueError(f"transformers cannot build this {config.model_type}: {error}") from error
    if lists := list(_lists_of_blocks(model)):  # if transformers lists none, ddpforge looks for blocks itself
        model.repeated = lists  # type: ignore[assignment]
    return model


def _adapted(model: nn.Module, lora: Adapters | None) -> nn.Module:
    return lora.put_into(model) if lora else model


def _saved(auto: Any, name: str, **options: Any) -> Any:
    folder = Path(name).expanduser()
    try:
        # Never runs code of the model's folder. Without the keyword transformers would prompt on the terminal.
        return auto.from_pretrained(str(folder) if folder.is_dir() else name, trust_remote_code=False, **options)
    except OSError as error:
        raise ValueError(
            f"`{name}` is neither a folder in which transformers saved a model nor a model on the hub that could be"
            f" downloaded: {str(error).splitlines()[0]}"
        ) from error


def _lists_of_blocks(model: nn.Module) -> Iterator[str]:
    """Yields the paths of the lists of layers, i.e. of modules whose classes are in `_no_split_modules`."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    for path, module in model.named_modules():
        members = [type(member).__name__ for member in module.children()]
        if isinstance(module, nn.ModuleList) and members and classes.issuperset(members):
            yield path


def _fields(config: type) -> tuple[Any, ...]:
    return fields(config) if is_dataclass(config) else ()


def _near(name: str, known: Any) -> str:
    near = get_close_matches(name, list(known), n=3)
    return f"; did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else ""
