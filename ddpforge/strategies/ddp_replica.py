"""Replica for data parallelism: the model in DistributedDataParallel, and the hooks of its all-reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddpforge import compat
from ddpforge.strategies.comm_hooks import DeferredAllReduce
from ddpforge.strategies.torch_replica import WholeReplica

__all__ = ["DDPReplica", "Wrapped"]

_HOOKS = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}


@contextmanager
def _frozen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Freezes parameters within the block."""
    # DistributedDataParallel registers the parameters that require gradients when it is constructed.
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


class Wrapped(NamedTuple):
    """DistributedDataParallel and the parts of its communication hook."""

    module: DistributedDataParallel
    holds_back: DeferredAllReduce | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        trained: Collection[int],
        options: Mapping[str, Any],
        compression: str,
    ) -> Wrapped:
        """Wraps `model` to reduce the gradients of parameters with an `id` in `trained`."""
        given: dict[str, Any] = {**options, **compat.leaves_buffers()}
        with _frozen(parameter for parameter in model.parameters() if id(parameter) not in trained):
            module = DistributedDataParallel(model, **given)
        hook: Any = _HOOKS.get(compression)
        holds_back = DeferredAllReduce(hook or default_hooks.allreduce_hook) if options["static_graph"] else None
        if holds_back:
            hook = holds_back.reduce
        if hook is not None:
            module.register_comm_hook(None, hook)
        return cls(module, holds_back)


class DDPReplica(WholeReplica):
    """Model in one DistributedDataParallel, or in one per update; it averages gradients during backward."""

    def __init__(self, *parts: Any, wrapped: Mapping[str, Wrapped], **options: Any) -> None:
        self._wrapped, self._now = wrapped, next(iter(wrapped.values()))
        super().__init__(*parts, module=self._now.module, **options)
        for other in list(wrapped.values())[1:]:
            self.compile(other.module)

    @contextmanager
    def select_update(self, name: str) -> Iterator[None]:
        """Also runs forward passes through the DistributedDataParallel of the update."""
        before = self._now
        self._now = self._wrapped[name]
        self.module = self._now.module
        try:
            with super().select_update(name):
                yield
        finally:
            self._now, self.module = before, before.module

    def forward(self, *, last: bool = True) -> AbstractContextManager[Any]:
        """Also postpones the all-reduce until the last micro-batch of the step."""
        wrapped, holds_back = self._now
        if holds_back is not None:
            holds_back.held = not last
        elif not last:
            return _both(wrapped.no_sync(), super().forward(last=last))
        return super().forward(last=last)
