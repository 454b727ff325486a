"""Cross-entropy of large bf16 logits with less memory than autograd needs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["low_memory_cross_entropy"]

_CHUNK = 2**28  # logits in float32 at the same time: 1 GiB


def low_memory_cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Returns the summed cross-entropy of bf16 logits [N, V] and int64 targets [N], in float32 (0-d).

    Probabilities are computed in float32 from the logits of 1 GiB at a time, and the gradient is kept in bf16. Autograd
    would keep three tensors of float32 [N, V] at its peak. The gradient is rounded twice: before and after the factor
    of the backward pass.
    """
    found: Tensor = _LowMemory.apply(logits, targets, ignore_index)
    return found


class _LowMemory(torch.autograd.Function):
    """Loss that computes the gradient of its logits in the forward pass."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss, counted = logits.new_zeros((), dtype=torch.float32), targets != ignore_index
        chunk = max(1, _CHUNK // logits.shape[1])
        for rows in (slice(start, start + chunk) for start in range(0, len(targets), chunk)):
            probabilities = F.log_softmax(logits[rows], dim=1, dtype=torch.float32)
            loss += F.nll_loss(probabilities, targets[rows], reduction="sum", ignore_index=ignore_index)
            if gradient is not None:
                classes = targets[rows].where(counted[rows], 0).unsqueeze(1)
                # p - 1 in float32: in bf16 it would be 0 if the model is nearly certain.
                of_target = probabilities.gather(1, classes).expm1_().to(logits.dtype)
                torch.exp(probabilities, out=gradient[rows]).scatter_(1, classes, of_target)
        ctx.save_for_backward(gradient, counted)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradient, counted = ctx.saved_tensors
        return torch.mul(gradient, (counted * scale).unsqueeze(1), out=torch.empty_like(gradient)), None, None
