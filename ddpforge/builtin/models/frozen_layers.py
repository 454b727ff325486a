"""Layers with frozen weights of other dtypes; outputs and gradients equal those of the same values in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

__all__ = ["forward_for", "frozen_linear", "packed_linear"]

Unpack = Callable[..., Tensor]


class _Product(torch.autograd.Function):
    """Product with a frozen weight, which is unpacked in forward and again in backward."""

    # Without it autograd would keep the unpacked weights of all layers until the backward pass.

    @staticmethod
    def forward(
        ctx: Any, unpack: Unpack, dtype: torch.dtype, x: Tensor, bias: Tensor | None, *packed: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*packed)
        ctx.unpack = unpack
        return F.linear(x.to(dtype), unpack(dtype, *packed), None if bias is None else bias.to(dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        packed = ctx.saved_tensors  # read once: activation checkpointing raises an error for a second time
        of_input = of_bias = None
        if ctx.needs_input_grad[2]:
            of_input = gradient @ ctx.unpack(gradient.dtype, *packed)
        if ctx.needs_input_grad[3]:
            of_bias = gradient.flatten(0, -2).sum(0)
        return None, None, of_input, of_bias, *(None for _ in packed)


def packed_linear(unpack: Unpack, x: Tensor, bias: Tensor | None, *packed: Tensor) -> Tensor:
    """Returns x W^T + b in the dtype of autocast, or else of `x`; W is `unpack(dtype, *packed)`, and is not trained.

    Autograd keeps the tensors `packed`, but not W.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return _Product.apply(unpack, dtype, x, bias, *packed)  # type: ignore[no-any-return]


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x W^T + b for a frozen weight [outputs, inputs] of any float dtype, in the dtype of autocast or `x`.

    Autograd keeps the weight, and no copy of it in another dtype.
    """
    return packed_linear(_cast, x, bias, weight)


def _cast(dtype: torch.dtype, weight: Tensor) -> Tensor:
    return weight.to(dtype)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return frozen_linear(x, module.weight, module.bias)


def _embedding(module: nn.Embedding, indices: Tensor) -> Tensor:
    return nn.Embedding.forward(module, indices).float()


def _layer_norm(module: nn.LayerNorm, x: Tensor) -> Tensor:
    return F.layer_norm(x, module.normalized_shape, _float(module.weight), _float(module.bias), module.eps)


def _rms_norm(module: nn.RMSNorm, x: Tensor) -> Tensor:
    return F.rms_norm(x, module.normalized_shape, _float(module.weight), module.eps)


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.float()


_FORWARDS: Mapping[Callable[..., Tensor], Callable[..., Tensor]] = {
    nn.Linear.forward: _linear,
    nn.Embedding.forward: _embedding,
    nn.LayerNorm.forward: _layer_norm,
    nn.RMSNorm.forward: _rms_norm,
}


def forward_for(module: nn.Module) -> Callable[..., Tensor] | None:
    """Returns a function of the module and its inputs that replaces `forward` for 16-bit frozen weights; else None."""
    # nn.MultiheadAttention reads the weights of a NonDynamicallyQuantizableLinear in its own forward pass.
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None
    return _FORWARDS.get(type(module).forward) or module.__dict__.get("any_dtype_forward")
