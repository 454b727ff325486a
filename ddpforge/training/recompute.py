"""Activation checkpointing: a block's activations are computed again in the backward pass, with the same numbers.

All of them (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016), or those that cost least to compute
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddpforge.errors import UsageError

__all__ = ["recomputed"]

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_COSTLY = {
    _aten.convolution.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
}
_REFUSED = ("has been mutated", "backward an extra time", "not found in storage")  # torch's words


def recomputed(block: nn.Module, forward: Callable[..., Any], *, selective: bool = False) -> Callable[..., Any]:
    """The `forward` of `block`, keeping nothing between its layers for the backward pass.

    One that is `selective` keeps what attention, convolutions and every second matrix product give.

    The second pass begins with the buffers and the random numbers that the first began with, and what it does to them
    does not count.
    """
    contexts = partial(_contexts, block, selective=selective)
    choosing: dict[str, Any] = {"context_fn": _chosen} if selective else {}

    def call(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = arguments
        return forward(*args, **kwargs)

    def forward_twice(*args: Any, **kwargs: Any) -> Any:
        # One positional argument: torch keeps the random numbers of devices that it finds in positional ones only.
        arguments = args, kwargs
        if torch.compiler.is_compiling():
            # What is traced is recomputed without its effects.
            return checkpoint(call, arguments, use_reentrant=False, **choosing)
        if not torch.is_grad_enabled():
            return call(arguments)
        return checkpoint(call, arguments, use_reentrant=False, context_fn=contexts)

    return forward_twice


def _contexts(block: nn.Module, *, selective: bool) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of the first pass, and of the second."""
    first, second = _chosen() if selective else (nullcontext(), nullcontext())
    return first, _AsBefore(block, second)


def _chosen() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts that keep some of what is computed."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_EverySecond())  # type: ignore[no-untyped-call]
    return contexts


class _EverySecond:
    """Keeps the results of costly operations, and of every second matrix product."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # so far, in the first pass and in the second

    def __call__(self, at: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            self._products[at.is_recompute] += 1
        kept = operation in _COSTLY or (operation in _PRODUCTS and self._products[at.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _AsBefore(AbstractContextManager[None]):
    """Gives a module, inside, copies of the buffers that it had when this was made, and python's and numpy's random
    numbers of then; torch sees to its own.

    Copies stand in for the buffers themselves, because autograd may still need those that the first pass used. `inner`
    is entered too.
    """

    def __init__(self, module: nn.Module, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner
        self._places = [
            (owner._buffers, name)
            for owner in module.modules()
            for name, buffer in owner._buffers.items()
            if buffer is not None
        ]
        self._before = _copies([buffers[name] for buffers, name in self._places])
        self._random = random.getstate(), np.random.get_state()

    def __enter__(self) -> None:
        self._now = [buffers.get(name) for buffers, name in self._places]
        self._random_now = random.getstate(), np.random.get_state()
        self._put(_copies(self._before), self._random)  # copied again: there may be a third pass
        self._inner.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._inner.__exit__(kind, error, trace)
        self._put(self._now, self._random_now)
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _REFUSED):
            raise UsageError(
                f'train.activation_checkpointing = "selective" does not suit this model: {str(error).rstrip(".")}',
                hints=["set train.activation_checkpointing = true, which keeps nothing"],
            ) from error

    def _put(self, tensors: Sequence[Tensor | None], states: tuple[Any, Any]) -> None:
        for (buffers, name), tensor in zip(self._places, tensors, strict=True):
            buffers[name] = tensor
        python, numpy = states
        random.setstate(python)
        np.random.set_state(numpy)


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies, of which those of one tensor are one."""
    made = {id(tensor): tensor.detach().clone() for tensor in tensors if tensor is not None}
    return [made.get(id(tensor)) for tensor in tensors]
