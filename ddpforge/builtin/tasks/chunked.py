"""Chunked cross-entropy of an output layer: only one chunk of logits is in memory at a time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddpforge.builtin.tasks.forms import reject_targets
from ddpforge.builtin.tasks.large_logits import logits_gradient, sum_of_rows
from ddpforge.errors import UsageError

__all__ = ["chunked_cross_entropy", "log_probabilities_in_chunks"]


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    targets: Tensor,
    chunk: int,
    ignore_index: int,
    task: str,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Returns the cross-entropy of logits `hidden @ weight.T + bias`, summed over the targets (0-d).

    The forward pass also computes the gradients, so no product is computed twice. Gradients of `weight` are accumulated
    in its own dtype.

    Args:
        hidden: [..., C].
        weight: [V, C].
        bias: [V].
        targets: int64 [...].
        chunk: Number of targets with logits in memory at the same time, in autocast's dtype and in fp32.
        ignore_index: Target that does not count.
        task: Name of the task, for error messages.
        label_smoothing: Probability that is distributed evenly over all classes.
        z_loss: Weight of the squared logarithm of the softmax's denominator.

    Raises:
        UsageError: A target is not a class, or this rank has only a part of `weight`.
    """
    reject_sharded(weight, task)
    try:
        found: Tensor = _Chunked.apply(
            hidden.flatten(0, -2),
            weight,
            bias,
            targets.flatten(),
            chunk,
            ignore_index,
            label_smoothing,
            z_loss,
            torch.is_grad_enabled(),
        )
    except (IndexError, RuntimeError) as error:
        reject_targets(
            error, task, torch.empty(*targets.shape, len(weight), dtype=hidden.dtype, device="meta"), targets
        )
    return found


def reject_sharded(weight: Tensor, task: str) -> None:
    """Raises UsageError if this rank has only a part of the output layer's `weight`."""
    if hasattr(weight, "full_tensor"):
        raise UsageError(
            f"task {task}: `loss_chunk` needs the weights of the output layer in the model's own forward pass, but the "
            "output layer is part of a block that is gathered separately",
            hints=["name classes in train.blocks that do not contain the output layer", "or remove train.blocks"],
        )


class _Chunked(torch.autograd.Function):
    """Loss that computes its gradients in the forward pass, so that logits are not computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        chunk: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
        trains: bool,
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        for_hidden, for_weight, for_bias = [trains and needed for needed in ctx.needs_input_grad[:3]]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight) if for_weight else None
        grad_bias = torch.zeros_like(bias) if bias is not None and for_bias else None
        cast, loss = weight.to(dtype), hidden.new_zeros((), dtype=exact)
        shift = None if bias is None else bias.to(dtype)

        for rows in (slice(start, start + chunk) for start in range(0, len(targets), chunk)):
            inputs, ignored = hidden[rows].to(dtype), targets[rows] == ignore_index
            classes = targets[rows].masked_fill(ignored, 0).unsqueeze(1)
            logits = F.linear(inputs, cast, shift).to(exact)
            total = logits.logsumexp(1, keepdim=True)
            # Not in place: if this is compiled, torch 2.11 takes no gradients of the result.
            loss = loss + sum_of_rows(logits, total, classes, smoothing, z_loss).masked_fill(ignored, 0).sum()
            if not (for_hidden or for_weight or for_bias):
                continue
            gradient = logits_gradient(logits, total, classes, smoothing, z_loss)
            gradient = gradient.masked_fill_(ignored.unsqueeze(1), 0).to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ cast
            if grad_weight is not None:
                grad_weight += gradient.t() @ inputs
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if gradient is None else gradient * scale for gradient in ctx.saved_tensors]
        return *found, None, None, None, None, None, None


def log_probabilities_in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    targets: Tensor,
    chunk: int,
    ignore_index: int,
    task: str,
) -> Tensor:
    """Returns the log-probability of each target, fp32 [...], from logits `hidden @ weight.T + bias`; 0 for ignored.

    The backward pass computes the logits again, because each target may have another gradient. For arguments and errors
    see `chunked_cross_entropy`.
    """
    reject_sharded(weight, task)
    found: Tensor = _LogProbabilities.apply(hidden.flatten(0, -2), weight, bias, targets.flatten(), chunk, ignore_index)
    return found.view_as(targets)


class _LogProbabilities(torch.autograd.Function):
    """Log-probabilities of targets; logits are computed in chunks, also in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, ignore_index: int
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        cast, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        ignored = targets == ignore_index
        classes = targets.masked_fill(ignored, 0).unsqueeze(1)
        found, totals = [], []
        for rows in (slice(start, start + chunk) for start in range(0, len(targets), chunk)):
            logits = F.linear(hidden[rows].to(dtype), cast, shift).to(torch.promote_types(dtype, torch.float32))
            totals.append(logits.logsumexp(1, keepdim=True))
            found.append((logits.gather(1, classes[rows]) - totals[-1]).squeeze(1))
        ctx.save_for_backward(hidden, weight, bias, classes, ignored, torch.cat(totals))
        ctx.chunk, ctx.dtype = chunk, dtype
        return torch.cat(found).masked_fill(ignored, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, classes, ignored, totals = ctx.saved_tensors
        cast, shift = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        for_hidden, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight) if for_weight else None
        grad_bias = torch.zeros_like(bias) if for_bias else None
        factor = -scale.masked_fill(ignored, 0).unsqueeze(1)
        for rows in (slice(start, start + ctx.chunk) for start in range(0, len(hidden), ctx.chunk)):
            inputs = hidden[rows].to(ctx.dtype)
            logits = F.linear(inputs, cast, shift).to(totals.dtype)
            gradient = (logits_gradient(logits, totals[rows], classes[rows], 0.0, 0.0) * factor[rows]).to(ctx.dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ cast
            if grad_weight is not None:
                grad_weight += gradient.t() @ inputs
            if grad_bias is not None:
                grad_bias += gradient.sum(0)
        return grad_hidden, grad_weight, grad_bias, None, None, None
