"""timm's models by name, untrained or pretrained, with a head for `classes` classes."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any

import timm
from pydantic import Field
from torch import nn

__all__ = ["ddpforge_plugin_api", "timm_model"]

ddpforge_plugin_api = 3

_Rate = Annotated[float, Field(ge=0, lt=1)]
# Keyword arguments of timm that another option sets, or ("") that would not build a classifier.
_OWNED = {
    "num_classes": "classes",
    "img_size": "image_size",
    "in_chans": "channels",
    "drop_rate": "drop_rate",
    "drop_path_rate": "drop_path_rate",
    "pretrained": "pretrained",
    "checkpoint_path": "checkpoint.init_from",
    "pretrained_cfg": "checkpoint.init_from",  # this and the next may name a file, which timm might unpickle
    "pretrained_cfg_overlay": "checkpoint.init_from",
    "model_name": "arch",
    "features_only": "",
}


def timm_model(
    *,
    arch: Annotated[str, Field(max_length=200, description='Model of timm, e.g. "resnet50" or "resnet50.a1_in1k".')],
    classes: Annotated[int, Field(ge=1, le=2**20, description="Number of classes.")],
    image_size: Annotated[
        int | tuple[int, int] | None,
        Field(description="Height and width, for models with a fixed size; absent: the model's own."),
    ] = None,
    channels: Annotated[int, Field(ge=1, le=4096, description="Channels of an image.")] = 3,
    drop_rate: Annotated[_Rate | None, Field(description="Dropout before the head; absent: the model's own.")] = None,
    drop_path_rate: Annotated[
        _Rate | None, Field(description="Rate of stochastic depth; absent: the model's own.")
    ] = None,
    pretrained: Annotated[bool, Field(description="Download timm's weights and begin with them.")] = False,
    options: Annotated[
        Mapping[str, Any],
        Field(description='More keyword arguments of the architecture, e.g. { global_pool = "avg" }.'),
    ] = {},
) -> nn.Module:
    """Builds a classifier: [B, channels, H, W] → logits [B, classes].

    Raises ValueError for an unknown name, and for options that the architecture does not accept or would ignore.
    """
    _refuse_unknown(arch)
    if taken := sorted(_OWNED.keys() & options.keys()):
        instead = _OWNED[taken[0]]
        raise ValueError(
            f"options.{taken[0]} cannot be set: "
            + (f"use `{instead}`" if instead else "the model would not be a classifier")
        )
    given = {"img_size": image_size, "drop_rate": drop_rate, "drop_path_rate": drop_path_rate, **options}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        model: nn.Module = timm.create_model(
            arch, pretrained=pretrained, num_classes=classes, in_chans=channels, **given
        )
    except (TypeError, ValueError, AssertionError, RuntimeError, KeyError) as error:
        raise ValueError(f"timm cannot build `{arch}` with {given}: {error}") from error
    if getattr(model, "num_classes", classes) != classes:
        raise ValueError(f"timm's `{arch}` has no head for classes: `classes` would have no effect")
    model.outputs = classes  # type: ignore[assignment]  # any attribute may be set on a module
    return model


def _refuse_unknown(arch: str) -> None:
    """Raises ValueError for an unknown name or a hub address, which timm would download even without `pretrained`."""
    base, _, tag = arch.partition(".")
    known = timm.list_models()
    if base not in known:
        near = get_close_matches(base, known, n=3)
        hint = f"; did you mean {' or '.join(f'`{name}`' for name in near)}?" if near else ""
        raise ValueError(f"timm {timm.__version__} has no model `{arch}`{hint}")
    if tag and arch not in (tagged := timm.list_pretrained(f"{base}.*")):
        raise ValueError(f"timm has no weights `{tag}` of `{base}`; it has {', '.join(tagged) or 'none'}")
