"""Communication hook for DDP that postpones the all-reduce."""

# DDP inspects the annotations of a hook, which must not be strings: no `from __future__ import annotations` here.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

__all__ = ["DeferredAllReduce"]


class DeferredAllReduce:
    """Communication hook that leaves gradients local while `held` is True, and otherwise reduces them with `hook`."""

    # It replaces `no_sync` for static graphs: DDP learns the graph in the first step of a process and cannot skip the
    # reducer in later steps.

    def __init__(self, hook: Callable[..., Future[Tensor]]) -> None:
        self._hook, self.held = hook, False

    def reduce(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Reduces a bucket, or leaves it as it is; DDP calls this for each bucket of a backward pass."""
        if not self.held:
            return self._hook(None, bucket)
        gradients = bucket.buffer()
        done: Future[Tensor] = torch.futures.Future(devices=None if gradients.is_cpu else [gradients.device])
        done.set_result(gradients)
        return done
