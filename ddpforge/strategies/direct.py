"""Torch's backward pass and an optimizer's step without what torch puts around them for other uses: 0.05 ms a step."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import graph, profiler
from torch.optim import Optimizer, optimizer
from torch.overrides import has_torch_function_unary

__all__ = ["run_backward", "step"]


def run_backward(loss: Tensor, scale: Tensor | float) -> None:
    """Adds the gradients of `loss` (0-d) times `scale`, as `(loss * scale).backward()` would.

    Spares the product, its own backward pass, and the checks of arguments that `torch.autograd.backward` makes.
    """
    gradient = scale.to(loss) if isinstance(scale, Tensor) else torch.full_like(loss, scale)
    if has_torch_function_unary(loss):  # of a subclass, such as DTensor
        loss.backward(gradient)  # type: ignore[no-untyped-call]
        return
    run: Any = graph._engine_run_backward
    run((loss,), (gradient,), False, False, (), allow_unreachable=True, accumulate_grad=True)


def step(one: Optimizer) -> None:
    """Calls `one.step()`, but for the wrapper that tells torch's profiler and hooks of it, where there are none."""
    method: Any = type(one).step
    is_wrapped = getattr(method, "__code__", None) is _wrapper() and "step" not in vars(one)
    if is_wrapped and not profiler._is_profiler_enabled and not _has_hooks(one):
        method.__wrapped__(one)
    else:
        one.step()


@functools.cache
def _wrapper() -> Any:
    """The code of torch's wrapper, which is the same whatever method it is around."""
    return Optimizer.profile_hook_step(Optimizer.step).__code__


def _has_hooks(one: Optimizer) -> bool:
    of_all: Any = optimizer
    return bool(
        one._optimizer_step_pre_hooks
        or one._optimizer_step_post_hooks
        or of_all._global_optimizer_pre_hooks
        or of_all._global_optimizer_post_hooks
    )
