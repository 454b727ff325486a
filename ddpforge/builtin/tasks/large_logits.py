"""Cross-entropy of large logits with less memory than autograd needs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["logits_gradient", "low_memory_cross_entropy", "sum_of_rows"]

_CHUNK = 2**28  # logits in float32 at the same time: 1 GiB


def low_memory_cross_entropy(
    logits: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float = 0.0, z_loss: float = 0.0
) -> Tensor:
    """Returns the summed cross-entropy of bf16 logits [N, V] and int64 targets [N], in float32 (0-d).

    Probabilities are computed in float32 from the logits of 1 GiB at a time, and the gradient is kept in bf16. Autograd
    would keep three tensors of float32 [N, V] at its peak. The gradient is rounded twice: before and after the factor
    of the backward pass. For the last two arguments see `forms.cross_entropy`.
    """
    if label_smoothing or z_loss:
        found: Tensor = _LowMemoryExtended.apply(logits, targets, ignore_index, label_smoothing, z_loss)
        return found
    found = _LowMemory.apply(logits, targets, ignore_index)
    return found


def sum_of_rows(logits: Tensor, total: Tensor, classes: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """Returns the loss of each row of float32 logits [N, V].

    Args:
        total: logsumexp of each row, [N, 1].
        classes: int64 [N, 1].
        smoothing: probability that is distributed evenly over all classes.
        z_loss: weight of the square of `total`.
    """
    found = total - logits.gather(1, classes)
    if smoothing:
        found = (1 - smoothing) * found + smoothing * (total - logits.mean(1, keepdim=True))
    if z_loss:
        found = found + z_loss * total.square()
    return found.squeeze(1)


def logits_gradient(logits: Tensor, total: Tensor, classes: Tensor, smoothing: float, z_loss: float) -> Tensor:
    """Overwrites float32 logits [N, V] by the gradient of `sum_of_rows`, and returns them."""
    logits.sub_(total).exp_()  # probabilities
    if z_loss:
        logits.mul_(1 + 2 * z_loss * total)
    if smoothing:
        logits.sub_(smoothing / logits.shape[1])
    return logits.scatter_add_(1, classes, logits.new_full((), smoothing - 1).expand_as(classes))


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


class _LowMemoryExtended(torch.autograd.Function):
    """Loss with label smoothing and z-loss that computes the gradient of its logits in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int, smoothing: float, z_loss: float
    ) -> Tensor:
        gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        loss, ignored = logits.new_zeros((), dtype=torch.float32), targets == ignore_index
        classes = targets.masked_fill(ignored, 0).unsqueeze(1)
        chunk = max(1, _CHUNK // logits.shape[1])
        for rows in (slice(start, start + chunk) for start in range(0, len(targets), chunk)):
            exact = logits[rows].float()
            total = exact.logsumexp(1, keepdim=True)
            loss += sum_of_rows(exact, total, classes[rows], smoothing, z_loss).masked_fill(ignored[rows], 0).sum()
            if gradient is not None:
                gradient[rows] = logits_gradient(exact, total, classes[rows], smoothing, z_loss)
        ctx.save_for_backward(gradient, ~ignored)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradient, counted = ctx.saved_tensors
        scaled = torch.mul(gradient, (counted * scale).unsqueeze(1), out=torch.empty_like(gradient))
        return scaled, None, None, None, None
