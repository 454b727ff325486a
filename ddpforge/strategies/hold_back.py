"""Lets DDP's reducer run for every micro-batch and reduce only the last."""

# DDP looks at the annotations of a hook, which must not be text: no `from __future__ import annotations` here.
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["HoldBack"]


class HoldBack:
    """A communication hook that leaves gradients as they are while `held`, and else reduces them with `hook`.

    DDP learns a static graph in a process's first step and then cannot skip the reducer, as `no_sync` does.
    """

    def __init__(self, hook: Callable[..., Future[Tensor]]) -> None:
        self._hook, self.held = hook, False

    def reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Called by DDP with each bucket of a backward pass."""
        if not self.held:
            return self._hook(None, bucket)
        gradients = bucket.buffer()
        done: Future[Tensor] = torch.futures.Future(devices=[gradients.device] if gradients.is_cuda else None)
        done.set_result(gradients)
        return done
