"""Builds models of transformers: configs, saved weights, new tokens, quantized layers and adapters."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, TypeGuard, cast

import torch
from ddpforge.builtin.models.frozen_layers import frozen_linear
from ddpforge.builtin.models.lora import Adapters
from ddpforge.builtin.models.quantized import Quantization
from ddpforge.builtin.models.quantized import quantize as quantize_layers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.pytorch_utils import Conv1D

from ddpforge_transformers.data import saved_folder

__all__ = [
    "adapted",
    "body_of",
    "check_new_rows_are_trained",
    "check_quantize",
    "check_tables",
    "config_of",
    "is_plain_linear",
    "model_of",
    "quantize_blocks",
    "resize",
]

_OWNED = {"model_type", "num_labels", "id2label", "label2id", "dtype", "torch_dtype", "architectures"}


def config_of(model_type: str | None, pretrained: str | None, options: Mapping[str, Any]) -> PreTrainedConfig:
    """Returns the config; raises ValueError for unknown keys, which transformers accepts silently."""
    if (model_type is None) == (pretrained is None):
        raise ValueError("set either `model_type` (random weights) or `pretrained`")
    if pretrained is not None:
        try:
            known = type(_saved(AutoConfig, pretrained))
        except ValueError as error:
            raise ValueError(f"pretrained: {error}") from error
    elif model_type in CONFIG_MAPPING:
        known = CONFIG_MAPPING[model_type]
    else:
        raise ValueError(
            f"transformers has no model_type `{model_type}`{_near(str(model_type), CONFIG_MAPPING.keys())}"
        )

    keys = {*known().to_dict(), *known.attribute_map, *(field.name for field in _fields(known))} - _OWNED
    keys |= {"decoder_start_token_id"} if known().is_encoder_decoder else set()
    for key in options:
        if key in _OWNED:
            raise ValueError(f"options.{key} cannot be set: other options or the recipe determine it")
        if key not in keys:
            raise ValueError(f"the config of {known.model_type} has no key `{key}`{_near(key, keys)}")
    try:
        return _saved(AutoConfig, pretrained, **options) if pretrained is not None else known(**options)
    except Exception as error:  # configs raise their own classes, without a common base
        raise ValueError(f"{known.model_type} refuses its options {dict(options)}: {error}") from error


def check_tables(config: Any, options: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown keys in the tables of `options` that are configs of parts of a model."""
    for name, table in options.items():
        part = getattr(config, name, None)
        if not isinstance(table, Mapping) or not isinstance(part, PreTrainedConfig):
            continue
        known = {*type(part)().to_dict(), *part.attribute_map, *(one.name for one in _fields(type(part)))}
        for key in table:
            if key not in known:
                raise ValueError(
                    f"options.{name}: the config of {part.model_type} has no key `{key}`{_near(key, known)}"
                )


def model_of(
    auto: Any, config: PreTrainedConfig, pretrained: str | None, attention: str | None
) -> tuple[nn.Module, set[str]]:
    """Builds the model with weights of the saved dtype, see `train.frozen_dtype`, or with new ones in float32.

    Also returns the names of parameters that the saved model does not have; no names if all are new.
    """
    new: set[str] = set()
    how: dict[str, Any] = {"attn_implementation": attention} if attention else {}
    try:
        if pretrained is not None:
            model, new = _saved_model(auto, pretrained, config=config, **how)
        else:
            model = auto.from_config(config, dtype=torch.float32, **how)
    except (ValueError, ImportError) as error:
        raise ValueError(f"transformers cannot build this {config.model_type}: {error}") from error
    if lists := list(_lists_of_blocks(model)):  # if transformers lists none, ddpforge looks for blocks itself
        model.repeated = lists  # type: ignore[assignment]
    return model, new


def _saved_model(auto: Any, name: str, **options: Any) -> tuple[nn.Module, set[str]]:
    """Loads a model with its saved dtypes, and marks it and its layers for `train.frozen_dtype`.

    Also returns the names of parameters that are not saved.
    """
    model: nn.Module
    model, found = _saved(auto, name, dtype="auto", ignore_mismatched_sizes=True, output_loading_info=True, **options)
    _check_loaded(model, name, found)
    absent = {*found["missing_keys"], *(key for key, _, _ in found["mismatched_keys"])}
    new = absent & {key for key, _ in model.named_parameters()}
    if any(buffer.dtype in (torch.bfloat16, torch.float16) for buffer in model.buffers()):
        # Constants that are not weights were rounded, e.g. the scale of Gemma's embeddings.
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        del model
        model = _saved(auto, name, dtype=torch.float32, **options)
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])
    model.keeps_saved_dtype = True  # type: ignore[assignment]
    for module in model.modules():
        kind, layer = cast(tuple[Any, Any], (type(module), module))
        if isinstance(module, Conv1D):
            layer.any_dtype_forward = _conv1d
        elif isinstance(module, nn.Embedding) and isinstance(getattr(module, "embed_scale", None), torch.Tensor):
            layer.any_dtype_forward = _scaled_embedding
        elif kind.__name__.endswith("RMSNorm") and kind is not nn.RMSNorm:
            layer.any_dtype_forward = kind.forward  # it multiplies, and torch promotes
    return model, new


def _check_loaded(model: Any, name: str, found: Mapping[str, Any]) -> None:
    """Raises ValueError for random weights that should be saved ones: all of blocks, and those of another shape.

    A new head of a classifier may have another shape. transformers logs a table of missing weights of other layers.
    """
    blocks = tuple(f"{path}." for path in _lists_of_blocks(model))
    body = "" if hasattr(model, "lm_head") or model.get_output_embeddings() else f"{body_of(model)}."
    lost = {key: "it is not saved" for key in found["missing_keys"] if key.startswith(blocks)}
    for key, saved, mine in found["mismatched_keys"]:
        if key.startswith(body):
            lost[key] = f"the saved shape is {tuple(saved)}, that of this model {tuple(mine)}"
    if lost:
        raise ValueError(
            f"{len(lost)} weights of `{name}` do not fit the model, and would become random, e.g. `{min(lost)}`:"
            f" {lost[min(lost)]}; remove `options` for shapes and numbers of layers. For a larger vocabulary, set"
            " resize_vocabulary"
        )


def _conv1d(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Computes the linear layer of GPT-2, whose weight is [inputs, outputs], with a frozen weight of any dtype."""
    return frozen_linear(x, module.weight.T, module.bias)


def _scaled_embedding(module: Any, indices: torch.Tensor) -> torch.Tensor:
    """Computes the embedding of Gemma, which is scaled in float32, with a frozen weight of any dtype."""
    found: torch.Tensor = nn.Embedding.forward(module, indices).float() * module.embed_scale
    return found


def resize(model: Any, tokens: int, *, saved: bool) -> None:
    """Adds rows for new tokens to the embeddings and the output layer; raises ValueError if there would be fewer."""
    if not saved:
        raise ValueError(f"resize_vocabulary is for `pretrained`; set options.vocab_size = {tokens}")
    has = model.get_input_embeddings().num_embeddings
    if tokens < has:
        raise ValueError(f"resize_vocabulary = {tokens}, but the saved model has {has} tokens; it can only add tokens")
    model.resize_token_embeddings(tokens)


def check_new_rows_are_trained(model: Any) -> None:
    """Raises ValueError if adapters leave the embeddings of new tokens frozen, which are random."""
    layers = {id(one): one for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None}
    names = [name for name, module in model.named_modules() if id(module) in layers]
    frozen = [name for name in names if not any(one.requires_grad for one in model.get_submodule(name).parameters())]
    if frozen:
        globs = ", ".join(f'"{name}.*"' for name in frozen)
        raise ValueError(
            f"resize_vocabulary adds random rows to {', '.join(frozen)}, which `lora` freezes; set lora.train ="
            f" [{globs}]"
        )


def check_quantize(form: str | None, double: bool | None, lora: Adapters | None, *, saved: bool) -> None:
    """Raises ValueError for options that do not fit together."""
    if double is not None and form != "nf4":
        raise ValueError('double_quant is for quantize = "nf4"')
    if form is None:
        return
    if lora is None:
        raise ValueError(f'quantize = "{form}" needs `lora`: quantized weights cannot be trained, only adapters can')
    if not saved:
        raise ValueError(
            f'quantize = "{form}" needs the saved weights of `pretrained`: random weights stay frozen and learn nothing'
        )


def is_plain_linear(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True for an nn.Linear, and not for a subclass."""
    return type(module) is nn.Linear


def quantize_blocks(model: nn.Module, form: Quantization, *, double: bool) -> None:
    """Quantizes the linear layers in the model's blocks; raises ValueError if there are none."""
    blocks = [f"{path}." for path in _lists_of_blocks(model)]
    layers = [
        name
        for name, module in model.named_modules()
        if is_plain_linear(module) and any(name.startswith(block) for block in blocks)
    ]
    if not layers:
        kinds = sorted(
            {type(module).__name__ for module in model.modules() if not any(True for _ in module.children())}
        )
        raise ValueError(
            f'quantize = "{form}" finds no nn.Linear in the blocks of {type(model).__name__}, which has '
            f"{', '.join(kinds)}"
        )
    quantize_layers(model, layers, form, double=double)
    # Loaded weights are views of the mapped file. While one is left, all pages that were read count as this process's.
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def body_of(model: Any) -> str:
    """Returns the name of the part of the model without its head."""
    return str(model.base_model_prefix)


def adapted(
    model: nn.Module, lora: Adapters | None, new: Collection[str], original: Mapping[str, Tensor] = {}
) -> nn.Module:
    """Inserts adapters, and trains new parameters, which are random; raises ValueError for targets that do not fit."""
    if lora is None:
        return model
    owners: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(path)
    found = lora.put_into(model, original)
    for path, layer in found.named_modules():
        if not hasattr(layer, "lora_A"):
            continue
        if f"{path}.weight" in new:
            raise ValueError(
                f"lora.targets adapts `{path}`, which is new: its weight is not saved, and random; remove it from the"
                " targets, and it is trained without an adapter"
            )
        weight = cast(Any, layer).get_base_layer()._parameters.get("weight")
        if others := [one for one in owners.get(id(weight), ()) if one != path]:
            raise ValueError(
                f"lora.targets adapts `{path}`, whose weight is tied to `{others[0]}`: an adapter changes only one of"
                " both, and cannot be merged; remove it from the targets"
            )
    for name, parameter in found.named_parameters():
        if name in new:
            parameter.requires_grad_(True)
    return found


def _saved(auto: Any, name: str, **options: Any) -> Any:
    place = saved_folder(name, "pretrained")
    try:
        # Never runs code of the model's folder. Without the keyword transformers would prompt on the terminal.
        return auto.from_pretrained(place, trust_remote_code=False, **options)
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
