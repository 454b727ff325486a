"""Untrained classifiers of torchvision, by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

if TYPE_CHECKING:
    from torch import nn

# By default these return auxiliary outputs in addition to the logits, and warn about their initial weights.
_WITH_AUXILIARY_OUTPUTS = {"googlenet", "inception_v3"}

# Steps of ResNet's forward pass; `layer1` to `layer4` are lists of blocks.
_RESNET = ("conv1", "bn1", "relu", "maxpool", "layer1", "layer2", "layer3", "layer4", "avgpool", "flat", "fc")


def torchvision_model(
    *,
    arch: Annotated[str, Field(max_length=200, description='Classifier of torchvision, e.g. "resnet50".')],
    classes: Annotated[int, Field(ge=1, le=2**20, description="Number of classes.")],
    options: Annotated[
        Mapping[str, Any],
        Field(description="Keywords of the architecture, e.g. { image_size = 32 } for a ViT."),
    ] = {},
) -> nn.Module:
    """Builds an untrained classifier of torchvision: [B, 3, H, W] → logits [B, classes].

    Raises ValueError for an unknown architecture, and for options that the architecture does not accept.
    """
    from torch import nn
    from torchvision import models

    known = models.list_models(module=models)
    if arch not in known:
        near = get_close_matches(arch, known, n=3)
        raise ValueError(
            f"torchvision.models has no classifier `{arch}`"
            + (f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else "")
        )

    plain = {"aux_logits": False, "init_weights": True} if arch in _WITH_AUXILIARY_OUTPUTS else {}
    try:
        model: nn.Module = models.get_model(arch, weights=None, num_classes=classes, **{**plain, **options})
    except (TypeError, ValueError, AssertionError) as error:
        raise ValueError(f"torchvision cannot build `{arch}` with options {dict(options)}: {error}") from error
    model.outputs = classes  # type: ignore[assignment]  # any attribute may be set on a module
    if type(model) is models.ResNet:
        model.flat = nn.Flatten()  # torchvision calls torch.flatten instead; the module has no state
        model.pipeline = _RESNET  # type: ignore[assignment]
    return model
