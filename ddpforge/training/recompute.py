"""Activation checkpointing: a block's activations are computed again in the backward pass, with the same numbers."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputed"]


def recomputed(block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """The `forward` of `block`, keeping nothing between its layers for the backward pass.

    The second pass begins with the buffers and the random numbers that the first began with, and what it does to them
    does not count.
    """
    contexts = partial(_contexts, block)

    def call(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = arguments
        return forward(*args, **kwargs)

    def forward_twice(*args: Any, **kwargs: Any) -> Any:
        # One positional argument: torch keeps the random numbers of devices that it finds in positional ones only.
        arguments = args, kwargs
        if torch.compiler.is_compiling():
            return checkpoint(call, arguments, use_reentrant=False)  # what is traced is recomputed without its effects
        if not torch.is_grad_enabled():
            return call(arguments)
        return checkpoint(call, arguments, use_reentrant=False, context_fn=contexts)

    return forward_twice


def _contexts(block: nn.Module) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """The contexts of the first pass, and of the second."""
    return nullcontext(), _AsBefore(block)


class _AsBefore(AbstractContextManager[None]):
    """Gives a module, inside, copies of the buffers that it had when this was made, and python's and numpy's random
    numbers of then; torch sees to its own.

    Copies stand in for the buffers themselves, because autograd may still need those that the first pass used.
    """

    def __init__(self, module: nn.Module) -> None:
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

    def __exit__(self, *exception: object) -> None:
        self._put(self._now, self._random_now)

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
