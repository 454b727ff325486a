"""Parts of a model of images and text: the vision tower, the projector and the language model."""

from collections.abc import Sequence
from typing import Any, Literal, cast

from ddpforge.builtin.models.lora import Adapters
from torch import nn

__all__ = ["ImagePart", "check_parts", "freeze_parts", "freeze_unused_layers", "in_language_model"]

ImagePart = Literal["vision_tower", "projector", "language_model"]
_PROJECTORS = ("merger", "deepstack_merger_list")  # inside the vision tower of Qwen's models


def check_parts(model: nn.Module) -> None:
    """Raises ValueError for a model that lacks a vision tower or a language model."""
    owners = set(_owners(model).values())
    if not {"vision_tower", "language_model"} <= owners:
        raise ValueError(
            f"{type(model).__name__} does not have both a vision tower and a language model; for text alone set use ="
            ' "causal_lm"'
        )


def freeze_parts(model: nn.Module, parts: Sequence[ImagePart]) -> None:
    """Freezes the parameters of parts; raises ValueError for a part that the model lacks, and if none is trained."""
    owners = _owners(model)
    for part in parts:
        if part not in owners.values():
            raise ValueError(
                f'freeze: {type(model).__name__} has no "{part}" of a known name; freeze it by globs: train.freeze'
            )
    for name, parameter in model.named_parameters():
        if owners[name] in parts:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(f"freeze = {list(parts)} names all parts of the model, so that nothing would be trained")


def freeze_unused_layers(model: Any) -> list[str]:
    """Freezes the layers of the vision tower after the last one whose output is read; returns their names.

    `vision_feature_layer` of the config, e.g. -2 of LLaVA, names the outputs that are read. Parameters of later layers
    get no gradient.
    """
    read = getattr(model.config, "vision_feature_layer", None)
    tower = _tower(model)
    lists = [
        (path, module)
        for path, module in tower.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == getattr(tower.config, "num_hidden_layers", 0)
    ]
    if read is None or len(lists) != 1:
        return []
    path, layers = lists[0]
    outputs = [one if one >= 0 else len(layers) + 1 + one for one in (read if isinstance(read, list) else [read])]
    if max(outputs) == len(layers):  # of the last layer; a norm after it may be used
        return []
    unused = [f"{path}.{number}" for number in range(max(outputs), len(layers))]
    unused += [name for name in ("post_layernorm",) if hasattr(tower, name)]
    for name in unused:
        tower.get_submodule(name).requires_grad_(False)
    return unused


def in_language_model(model: nn.Module, lora: Adapters | None) -> Adapters | None:
    """Returns `lora` with the whole names of its targets in the language model; globs stay as they are.

    Raises ValueError for targets that the language model does not have.
    """
    if lora is None or (lora.targets != "all-linear" and any(char in one for one in lora.targets for char in "*?[")):
        return lora
    owners = _owners(model)
    output = cast(Any, model).get_output_embeddings()
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and owners.get(f"{name}.weight") == "language_model" and module is not output
    ]
    if lora.targets == "all-linear":
        return lora.model_copy(update={"targets": layers})
    found: list[str] = []
    for target in lora.targets:
        mine = [name for name in layers if f".{name}".endswith(f".{target}")]
        if not mine:
            known = ", ".join(sorted({name.rpartition(".")[2] for name in layers}))
            raise ValueError(
                f'lora.targets: the language model has no linear layer "{target}"; it has {known}. Layers of other'
                f' parts are named by globs, e.g. "*.{target}"'
            )
        found += mine
    return lora.model_copy(update={"targets": found})


def _owners(model: nn.Module) -> dict[str, ImagePart]:
    """Returns the part of each parameter. The output layer belongs to the language model."""
    names = {id(module): name for name, module in model.named_modules()}
    every = cast(Any, model)
    tower, decoder, output = _tower(model), every.get_decoder(), every.get_output_embeddings()
    parts: list[tuple[Any, ImagePart]] = [
        (tower, "vision_tower"),
        (decoder, "language_model"),
        (output, "language_model"),
    ]
    starts = {names[id(one)]: part for one, part in parts if one is not model and id(one) in names}
    found: dict[str, ImagePart] = {}
    for name, _ in model.named_parameters():
        found[name] = next((part for start, part in starts.items() if name.startswith(f"{start}.")), "projector")
        if found[name] == "vision_tower" and any(one in name.split(".") for one in _PROJECTORS):
            found[name] = "projector"
    return found


def _tower(model: nn.Module) -> Any:
    return cast(Any, model).get_encoder(modality="image")
