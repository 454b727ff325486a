"""Low-rank adapters (LoRA) in checkpoints: folds them into the weights that they adapt, or renames them for peft."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.builtin.models.quantized import unpacked
from ddpforge.checkpoint.safetensors_writer import LazyTensor
from ddpforge.errors import UsageError
from ddpforge.interfaces.state import PACKED

__all__ = ["adapter_config", "adapter_tensors", "merged"]

_A, _B = "lora_A.default.weight", "lora_B.default.weight"
_MAGNITUDE = "lora_magnitude_vector.default.weight"  # of DoRA
_SCALING, _TRANSPOSED, _BASE = "lora_scaling", "lora_transposed", "base_layer."
_PEFT = "base_model.model."  # prefix of the names in a folder of peft


def merged(model: Mapping[str, LazyTensor], aliases: Mapping[str, str]) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Returns a model's tensors with all adapters folded in, and the other names of tied tensors.

    The weight of an adapted linear layer becomes W + s·B A and gets the layer's own name again. The model `lora` saves
    the scaling s. With DoRA each row is scaled to its trained length. Quantized weights become bfloat16. Raises
    UsageError if there are no adapters, or if an adapter cannot be folded.
    """
    model, quantized = _dequantized(model)
    layers = [name.removesuffix(_A) for name in model if name.endswith(_A)]
    if not layers:
        raise UsageError("--merge: the checkpoint contains no adapters", hints=["omit --merge"])
    _reject_ties(layers, aliases)
    found: dict[str, LazyTensor] = {}
    for name, tensor in model.items():
        layer = next((each for each in layers if name.startswith(each)), None)
        if layer is None:
            found[name] = tensor
        elif name.startswith(layer + _BASE):
            found[name.replace(layer + _BASE, layer, 1)] = tensor
    for layer in layers:
        found[f"{layer}weight"] = _folded(layer, model)
    for name in found:
        if "lora_" in name:
            raise UsageError(f"--merge: `{name}` is an adapter that cannot be folded into a weight")
    names = {old: new for layer in layers for old, new in _renamed(layer, model)}
    for name in (names.get(each, each) for each in quantized):
        found[name] = LazyTensor("bfloat16", found[name].shape, partial(_rounded, found[name]))
    return found, {names.get(alias, alias): names.get(name, name) for alias, name in aliases.items()}


def _reject_ties(layers: Sequence[str], aliases: Mapping[str, str]) -> None:
    """Raises UsageError if an adapted weight is tied to a layer without this adapter: folding would change both."""
    for pair in aliases.items():
        for one, other in (pair, pair[::-1]):
            layer, twin = (name.removesuffix(f"{_BASE}weight") for name in (one, other))
            if layer in layers and aliases.get(twin + _A) != layer + _A:
                raise UsageError(
                    f"--merge: `{layer}weight` is tied to `{other}`, which does not have this adapter",
                    hints=['--include "*lora_*" writes only the adapters'],
                )


def _renamed(layer: str, model: Mapping[str, LazyTensor]) -> Iterator[tuple[str, str]]:
    for name in model:
        if name.startswith(layer + _BASE):
            yield name, name.replace(layer + _BASE, layer, 1)


def _folded(layer: str, model: Mapping[str, LazyTensor]) -> LazyTensor:
    """Returns a layer's weight with its adapter folded in; it is computed when it is fetched."""
    magnitude = model.get(layer + _MAGNITUDE)
    needed = {part: model.get(layer + part) for part in (f"{_BASE}weight", _A, _B, _SCALING)}
    for part, tensor in needed.items():
        if tensor is None:
            raise UsageError(
                f"--merge: the checkpoint has no `{layer}{part}`",
                hints=['with checkpoint.save = "trainable" it contains only adapters: --include "*lora_*" writes them']
                if part == f"{_BASE}weight"
                else ["only adapters of the model `lora` can be folded in"],
            )
    base, a, b, scaling = (tensor for tensor in needed.values() if tensor is not None)
    fold = partial(_fold, base, a, b, scaling, magnitude, transposed=layer + _TRANSPOSED in model)
    return LazyTensor(base.dtype, base.shape, fold)


def _fold(
    base: LazyTensor,
    a: LazyTensor,
    b: LazyTensor,
    scaling: LazyTensor,
    magnitude: LazyTensor | None,
    *,
    transposed: bool,
) -> Tensor:
    weight = base.fetch()
    update = (b.fetch().float() @ a.fetch().float()) * scaling.fetch().float()
    found = (weight.float().T if transposed else weight.float()) + update
    if magnitude is not None:
        found *= (magnitude.fetch().float() / found.norm(dim=1))[:, None]
    return (found.T if transposed else found).to(getattr(torch, base.dtype)).contiguous()


def _dequantized(model: Mapping[str, LazyTensor]) -> tuple[dict[str, LazyTensor], list[str]]:
    """Returns the tensors with the weights of quantized layers in float32 under the name `weight`, and these names."""
    layers = [name.removesuffix(PACKED) for name in model if _is_quantized(name, model)]
    found = {}
    for name, tensor in model.items():
        layer = name.rpartition(".")[0] + "."
        if layer not in layers or name == f"{layer}bias":
            found[name] = tensor
        elif name == layer + PACKED:
            parts = {each.removeprefix(layer): model[each] for each in model if each.startswith(layer)}
            rows, columns = tensor.shape
            shape = (rows, columns if tensor.dtype == "int8" else 2 * columns)
            found[f"{layer}weight"] = LazyTensor("float32", shape, partial(_unpack, parts))
    return found, [f"{layer}weight" for layer in layers]


def _is_quantized(name: str, model: Mapping[str, LazyTensor]) -> bool:
    return name.endswith(f".{PACKED}") and name.removesuffix(PACKED) + "absmax" in model


def _unpack(parts: Mapping[str, LazyTensor]) -> Tensor:
    return unpacked({name: part.fetch() for name, part in parts.items()})


def _rounded(tensor: LazyTensor) -> Tensor:
    return tensor.fetch().to(torch.bfloat16)


# ---------------------------------------------------------------------------------------------- a folder of peft
def adapter_config(model: nn.Module) -> Any:
    """Returns peft's `LoraConfig` of an adapted model. Its `modules_to_save` are the modules trained without adapters.

    Raises UsageError if the model has no adapters, or if a folder of peft cannot hold a trained parameter.
    """
    known: Any = getattr(model, "peft_config", None)
    if not known:
        raise UsageError(
            f"{type(model).__name__} has no adapters",
            hints=["--format peft is for models with `lora`; omit it to write all weights"],
        )
    config = copy(known["default"])
    if config.init_lora_weights == "pissa":
        raise UsageError(
            'a folder of peft has adapters for the saved weights, and init = "pissa" has changed these',
            hints=["--merge writes all weights, with the adapters folded in"],
        )
    parts = (_A, _B, _MAGNITUDE)
    trained = [name for name, x in model.named_parameters() if x.requires_grad and not name.endswith(parts)]
    for name in trained:
        if "." not in name or _BASE in name:
            raise UsageError(
                f"`{name}` is trained without an adapter, and a folder of peft has no place for it",
                hints=["--merge writes all weights, with the adapters folded in"],
            )
    config.modules_to_save = sorted({name.rpartition(".")[0] for name in trained}) or None
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or None
    config.inference_mode = True
    base: Any = model
    if hasattr(base, "can_generate") and base.can_generate() and not base.config.is_encoder_decoder:
        config.task_type = "CAUSAL_LM"  # AutoPeftModelForCausalLM reads it
    return config


def adapter_tensors(model: Mapping[str, LazyTensor], config: Any) -> dict[str, LazyTensor]:
    """Returns the tensors that a folder of peft holds, by peft's names. Raises UsageError if one is missing."""
    modules = tuple(config.modules_to_save or ())
    found = {}
    for name, tensor in model.items():
        if name.endswith((_A, _B)):
            found[_PEFT + name.replace(".default.", ".")] = tensor
        elif name.endswith(_MAGNITUDE):
            found[_PEFT + name.removesuffix(".default.weight")] = tensor
        elif any(path.endswith(modules) for path in _owners(name)):
            found[_PEFT + name] = tensor
    if not any(name.endswith("lora_A.weight") for name in found):
        raise UsageError("--format peft: these weights contain no adapters")
    return found


def _owners(name: str) -> Iterator[str]:
    """Yields the modules that hold a tensor. peft saves each whose path ends with one of `modules_to_save`."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name
