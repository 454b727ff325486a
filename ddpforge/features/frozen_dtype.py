"""Keeps frozen weights in the dtype in which they were saved; results equal those with the same values in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from ddpforge.builtin.models.frozen_layers import forward_for
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.features import Feature

__all__ = ["FrozenDtype", "FrozenWeightDtype", "cast_weights"]

FrozenDtype = Literal["bf16", "fp16", "fp32"]
_DTYPES: Mapping[FrozenDtype, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_SMALL = (torch.bfloat16, torch.float16)


class FrozenWeightDtype(Feature):
    """Frozen weights in the dtype of `train.frozen_dtype`."""

    @staticmethod
    @override
    def built(model: nn.Module, train: TrainSection) -> None:
        cast_weights(model, train.frozen_dtype)


def cast_weights(model: nn.Module, frozen_dtype: FrozenDtype | None) -> None:
    """Makes trained weights float32, and frozen weights `frozen_dtype`; absent: the dtype in which they were saved.

    A model whose weights were loaded from files may have the attribute `keeps_saved_dtype = True`. Then it may have
    16-bit weights, and this function prepares it. Without this attribute and `frozen_dtype` nothing changes.

    The dtype is only that of memory: linear layers, embeddings and norms of torch convert a 16-bit weight at each use,
    and their results equal those of the same values in float32. A module of another class can do so too: its
    attribute `any_dtype_forward` is a function of the module and its inputs that replaces `forward` if the module has
    16-bit weights. The frozen weights of all other modules become float32.

    Raises ValueError if nothing is frozen, or a value is too large for `frozen_dtype`.
    """
    if frozen_dtype is None and not getattr(model, "keeps_saved_dtype", False):
        return
    frozen = {id(one) for one in model.parameters() if not one.requires_grad}
    if frozen_dtype is not None and not frozen:
        raise ValueError(
            "train.frozen_dtype has no effect, because all parameters are trained; freeze some with train.freeze, or "
            "use adapters"
        )
    wanted = None if frozen_dtype is None else _DTYPES[frozen_dtype]
    # A tied weight is converted by each of its modules, or it is float32.
    plain = {
        id(one) for module in model.modules() if not _forward_of(module) for one in module.parameters(recurse=False)
    }
    for name, parameter in model.named_parameters():
        if parameter.dtype in (*_SMALL, torch.float32):
            kept = wanted or parameter.dtype
            dtype = kept if id(parameter) in frozen and id(parameter) not in plain else torch.float32
            parameter.data = _cast(name, parameter.data, dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in _SMALL:
                setattr(module, name, buffer.float())
        forward = _forward_of(module)
        if forward and any(one.dtype in _SMALL for one in module.parameters(recurse=False)):
            module.forward = MethodType(forward, module)


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """Returns the forward function of the module for 16-bit weights; None if it has none, or trains its weight."""
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor) and weight.requires_grad:
        return None  # the bias alone may be frozen
    return forward_for(module)


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.dtype == dtype:
        return tensor
    cast = tensor.to(dtype)
    if dtype == torch.float16 and not cast.is_meta and (cast.isinf() & tensor.isfinite()).any():
        raise ValueError(f'train.frozen_dtype: `{name}` has values too large for fp16; use "bf16"')
    return cast
