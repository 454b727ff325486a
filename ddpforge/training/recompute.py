"""Activation checkpointing: a block's activations are computed again in the backward pass, with the same numbers.

All of them (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016), or those that cost least to compute
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
"""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from ddpforge import compat
from ddpforge.compat import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from ddpforge.errors import UsageError
from ddpforge.training.batchnorm import buffers_of
from ddpforge.training.ledger import storages, tensors_in

__all__ = ["recomputed"]

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_COSTLY = {_aten.convolution.default, *compat.attention_operators()}


def recomputed(block: nn.Module, forward: Callable[..., Any], *, selective: bool = False) -> Callable[..., Any]:
    """The `forward` of `block`, keeping nothing between its layers for the backward pass.

    One that is `selective` keeps what attention, convolutions and every second matrix product give.

    The second pass begins with the inputs, the buffers and the random numbers that the first began with, and what it
    does to them does not count. Raises UsageError, in the backward pass, where other code changed an input in place.
    """
    choosing: dict[str, Any] = {"context_fn": _chosen} if selective else {}
    habits = _Habits()

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
        inputs = _Inputs(type(block).__name__, arguments, habits)
        kept = _Kept() if selective else None

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = (_Keeping(kept), _Giving(kept)) if kept else (nullcontext(), nullcontext())
            return first, _AsBefore(block, inputs, second)

        def pass_(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            return call(inputs.now(arguments))

        output = checkpoint(pass_, arguments, use_reentrant=False, context_fn=contexts)
        inputs.after_first_pass()
        if kept:
            kept.after_first_pass()
        return output

    return forward_twice


class _Habits:
    """The inputs that a block changes in place, by their places: known after its first pass that is recomputed."""

    changed: frozenset[int] | None = None


class _Inputs:
    """The tensors that a block is given, for its second pass: as they were before the first.

    Those that the block itself changes in place are copied before; all are, where it is not known yet which those are.
    """

    def __init__(self, block: str, arguments: object, habits: _Habits) -> None:
        self._block, self._habits, self.again = block, habits, False
        leaves, self._form = tree_flatten(arguments)
        self._versions = {
            place: compat.version(leaf)
            for place, leaf in enumerate(leaves)
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_inference()
        }
        self._leaves: list[Tensor | None] = [
            leaf if place in self._versions else None for place, leaf in enumerate(leaves)
        ]
        copied = self._versions.keys() if habits.changed is None else self._versions.keys() & habits.changed
        self._copies = {place: leaves[place].detach().clone() for place in copied}

    def after_first_pass(self) -> None:
        """Drops the copies of what has not changed."""
        changed = frozenset(place for place, version in self._versions.items() if self._has_changed(place, version))
        self._habits.changed = changed | (self._habits.changed or frozenset())
        if missing := changed - self._copies.keys():
            self._refuse(min(missing), "now and then")
        self._copies = {place: copy for place, copy in self._copies.items() if place in changed}
        self._versions = {place: self._now(place) for place in self._versions}

    def now(self, arguments: Any) -> Any:
        """The arguments of this pass."""
        if not self.again:
            return arguments
        for place, version in self._versions.items():
            if place not in self._copies and self._has_changed(place, version):
                self._refuse(place, "after it")
        if not self._copies:
            return arguments
        leaves = tree_leaves(arguments)
        for place, copy in self._copies.items():
            # Not a leaf of autograd's, because those that require gradients cannot be changed in place.
            leaves[place] = copy.detach().requires_grad_(leaves[place].requires_grad).clone()
        return tree_unflatten(leaves, self._form)

    def _now(self, place: int) -> int | None:
        return compat.version(self._tensor(place))

    def _has_changed(self, place: int, version: int | None) -> bool:
        """True for an input that was written to since it had that version, or may have been."""
        return version is None or self._now(place) != version

    def _tensor(self, place: int) -> Tensor:
        leaf = self._leaves[place]
        assert leaf is not None
        return leaf

    def _refuse(self, place: int, when: str) -> NoReturn:
        raise UsageError(
            f"train.activation_checkpointing: what {self._block} is given (a tensor {list(self._tensor(place).shape)}) "
            f"is changed in place {when}, and the block would be computed again from the changed one",
            hints=[
                "change a copy of it in the model's forward: `x = x + y` in place of `x += y`",
                "or set train.activation_checkpointing = false",
            ],
        )


# ------------------------------------------------------------------------------------------------- what is kept
class _Kept:
    """Results of a first pass for the second, as long as nothing has been written into them."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, int], Any] = {}  # by operation, and its number among its like
        self._of: dict[int, tuple[Any, int]] = {}  # by storage
        self._names: list[tuple[tuple[Any, int], weakref.ref[Tensor]]] = []  # tensors that share such a storage
        self._versions: list[tuple[tuple[Any, int], Tensor, int | None]] = []

    def keep(self, key: tuple[Any, int], result: Any) -> None:
        """Keeps what an operation gave. Detached, as the graph that `result` becomes part of holds what is kept."""
        self._results[key] = tree_map_only(Tensor, Tensor.detach, result)
        self._of |= {id(storage): key for tensor in tensors_in(result) for storage in storages(tensor)}

    def name(self, result: Any) -> None:
        """Remembers tensors that share a storage with what is kept: not all views count writes with what they view."""
        for tensor in tensors_in(result):
            for storage in storages(tensor):
                if key := self._of.get(id(storage)):
                    self._names.append((key, weakref.ref(tensor)))

    def written(self, tensor: Tensor) -> None:
        """Drops what is kept in the storage of `tensor`."""
        for storage in storages(tensor):
            if key := self._of.pop(id(storage), None):
                self._results.pop(key, None)

    def after_first_pass(self) -> None:
        """Counts writes from now on by torch's versions, as operations outside of the block are not seen."""
        with torch.no_grad():
            for key, name in self._names:
                if key in self._results and (tensor := name()) is not None:
                    self._versions.append((key, tensor.detach(), compat.version(tensor)))
        self._names.clear()

    def before_second_pass(self) -> None:
        """Drops what was written into since the first."""
        for key, tensor, version in self._versions:
            if version is None or compat.version(tensor) != version:
                self._results.pop(key, None)
        self._versions.clear()

    def take(self, key: tuple[Any, int]) -> Any:
        """Returns what was kept, once; None if there is nothing (a third pass computes all again)."""
        return self._results.pop(key, None)


class _Keeping(compat.DispatchMode):
    """Keeps the results of costly operations, and of every second matrix product."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept, self._count = kept, Counter[Any]()
        self._products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in compat.written(func, args, kwargs):
            self._kept.written(tensor)
        result = func(*args, **kwargs)
        if func in _PRODUCTS or func in _COSTLY:
            self._products += func in _PRODUCTS
            # With dropout it is not kept: left out, it would leave its random numbers to what comes after it.
            keep = func in _COSTLY or self._products % 2
            if (
                keep
                and not compat.argument(func, "dropout_p", args, kwargs)
                and all(map(_is_plain, tensors_in(result)))
            ):
                self._kept.keep((func, self._count[func]), result)
            self._count[func] += 1
        self._kept.name(result)
        return result


class _Giving(compat.DispatchMode):
    """Gives in a second pass what was kept of the first."""

    def __init__(self, kept: _Kept) -> None:
        super().__init__()
        self._kept, self._count = kept, Counter[Any]()

    def __enter__(self) -> _Giving:
        self._count.clear()
        self._kept.before_second_pass()
        super().__enter__()
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS or func in _COSTLY:
            self._count[func] += 1
            if (result := self._kept.take((func, self._count[func] - 1))) is not None:
                return result
        return func(*args, **(kwargs or {}))


def _is_plain(tensor: Tensor) -> bool:
    """True where the storages of a tensor are known, so that writes into it are seen."""
    return isinstance(tensor, DTensor) or not compat.is_wrapper(tensor)


def _chosen() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts that keep some of what is computed, for compilers: what they trace has no writes in place."""
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

    def __init__(self, module: nn.Module, inputs: _Inputs, inner: AbstractContextManager[Any]) -> None:
        self._inputs, self._inner = inputs, inner
        self._places = [(owner, name) for owner in module.modules() for name, _ in buffers_of(owner)]
        self._before = _copies([owner.get_buffer(name) for owner, name in self._places])
        self._random = random.getstate(), np.random.get_state()

    def __enter__(self) -> None:
        self._now = [getattr(owner, name, None) for owner, name in self._places]
        self._random_now = random.getstate(), np.random.get_state()
        self._put(_copies(self._before), self._random)  # copied again: there may be a third pass
        self._inputs.again = True
        self._inner.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._inner.__exit__(kind, error, trace)
        self._put(self._now, self._random_now)

    def _put(self, tensors: Sequence[Tensor | None], states: tuple[Any, Any]) -> None:
        for (owner, name), tensor in zip(self._places, tensors, strict=True):
            setattr(owner, name, tensor)
        python, numpy = states
        random.setstate(python)
        np.random.set_state(numpy)


def _copies(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies, of which those of one tensor are one."""
    made = {id(tensor): tensor.detach().clone() for tensor in tensors if tensor is not None}
    return [made.get(id(tensor)) for tensor in tensors]
