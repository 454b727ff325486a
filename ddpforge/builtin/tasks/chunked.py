"""Chunked cross-entropy of an output layer: only one chunk of logits is in memory at a time."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddpforge.builtin.tasks.forms import reject_targets
from ddpforge.errors import UsageError

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, ignore_index: int, task: str
) -> Tensor:
    """Returns the cross-entropy of logits `hidden @ weight.T`, summed over the targets (0-d).

    The forward pass also computes the gradients, so no product is computed twice. Gradients of `weight` are accumulated
    in its own dtype.

    Args:
        hidden: [..., C].
        weight: [V, C].
        targets: int64 [...].
        chunk: Number of targets with logits in memory at the same time, in autocast's dtype and in fp32.
        ignore_index: Target that does not count.
        task: Name of the task, for error messages.

    Raises:
        UsageError: A target is not a class, or this rank has only a part of `weight`.
    """
    if hasattr(weight, "full_tensor"):
        raise UsageError(
            f"task {task}: `loss_chunk` needs the weights of the output layer in the model's own forward pass, but the "
            "output layer is part of a block that is gathered separately",
            hints=["name classes in train.blocks that do not contain the output layer", "or remove train.blocks"],
        )
    try:
        found: Tensor = _Chunked.apply(
            hidden.flatten(0, -2), weight, targets.flatten(), chunk, ignore_index, torch.is_grad_enabled()
        )
    except (IndexError, RuntimeError) as error:
        reject_targets(
            error, task, torch.empty(*targets.shape, len(weight), dtype=hidden.dtype, device="meta"), targets
        )
    return found


class _Chunked(torch.autograd.Function):
    """Loss that computes its gradients in the forward pass, so that logits are not computed again in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, ignore_index: int, trains: bool
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        exact = torch.promote_types(dtype, torch.float32)
        for_hidden, for_weight = [trains and needed for needed in ctx.needs_input_grad[:2]]
        grad_hidden = torch.empty_like(hidden) if for_hidden else None
        grad_weight = torch.zeros_like(weight) if for_weight else None
        cast, loss = weight.to(dtype), hidden.new_zeros((), dtype=exact)

        for rows in (slice(start, start + chunk) for start in range(0, len(targets), chunk)):
            inputs, ignored = hidden[rows].to(dtype), targets[rows] == ignore_index
            classes = targets[rows].masked_fill(ignored, 0).unsqueeze(1)
            logits = (inputs @ cast.t()).to(exact)
            total = logits.logsumexp(1)
            # Not in place: if this is compiled, torch 2.11 takes no gradients of the result.
            loss = loss + (total - logits.gather(1, classes).squeeze(1)).masked_fill(ignored, 0).sum()
            if not (for_hidden or for_weight):
                continue
            # In place: probabilities, minus 1 at the target.
            logits.sub_(total.unsqueeze(1)).exp_().scatter_add_(1, classes, logits.new_full((), -1).expand_as(classes))
            gradient = logits.masked_fill_(ignored.unsqueeze(1), 0).to(dtype)
            if grad_hidden is not None:
                grad_hidden[rows] = gradient @ cast
            if grad_weight is not None:
                grad_weight += gradient.t() @ inputs
        ctx.save_for_backward(grad_hidden, grad_weight)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = [None if found is None else found * scale for found in ctx.saved_tensors]
        return grad_hidden, grad_weight, None, None, None, None
