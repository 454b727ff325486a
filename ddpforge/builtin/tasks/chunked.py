"""The cross-entropy of an output layer without all of its logits in memory: they are computed chunk by chunk."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ddpforge.builtin.tasks.forms import refuse_targets
from ddpforge.errors import UsageError

__all__ = ["chunked_cross_entropy"]


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, chunk: int, ignore_index: int, task: str
) -> Tensor:
    """The cross-entropy of logits `hidden @ weight.T`, summed over the targets that are not `ignore_index` (0-d).

    `hidden` is [..., C], `weight` [V, C], `targets` int64 [...]. Logits of `chunk` targets are in memory at a time, in
    autocast's dtype and in fp32, and gradients are computed along with them: no product is computed twice. Gradients
    of `weight` add up in its own dtype. Raises UsageError for targets that are no classes, and for weights of which
    this rank has a part only; `task` is who asks.
    """
    if hasattr(weight, "full_tensor"):
        raise UsageError(
            f"task {task}: with `loss_chunk` the model's own forward pass reads the weights of its output layer, which "
            "are gathered for a block by itself",
            hints=["name other classes in train.blocks, so that the output layer lies in none", "or leave it out"],
        )
    try:
        found: Tensor = _Chunked.apply(
            hidden.flatten(0, -2), weight, targets.flatten(), chunk, ignore_index, torch.is_grad_enabled()
        )
    except (IndexError, RuntimeError) as error:
        refuse_targets(
            error, task, torch.empty(*targets.shape, len(weight), dtype=hidden.dtype, device="meta"), targets
        )
    return found


class _Chunked(torch.autograd.Function):
    """The loss, and its gradients on the way: logits that are here need not be computed again for them."""

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
            # Not in place: where that is compiled, torch 2.11 takes no gradients of what is returned.
            loss = loss + (total - logits.gather(1, classes).squeeze(1)).masked_fill(ignored, 0).sum()
            if not (for_hidden or for_weight):
                continue
            # In place: probabilities, less 1 at the target.
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
