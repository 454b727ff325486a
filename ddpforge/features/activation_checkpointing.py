"""Activation checkpointing: computes a block's activations again in the backward pass, with the same numbers.

Either all of them (Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016), or the ones that are cheap to
compute (Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022).
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
from ddpforge.features.activation_offload import BlockPass, OnHost, PassesOnHost
from ddpforge.features.memory_tracker import storages, tensors_in
from ddpforge.training.buffers import buffers_of

__all__ = ["checkpointed"]

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_COSTLY = {_aten.convolution.default, *compat.attention_operators()}


def checkpointed(
    block: nn.Module, forward: Callable[..., Any], *, selective: bool = False, passes: PassesOnHost | None = None
) -> Callable[..., Any]:
    """Returns a `forward` of `block` that recomputes its activations in the backward pass and does not keep them.

    With `selective`, it keeps the results of attention, convolutions and every second matrix product. With `passes`,
    the inputs of the block are in host memory until then.

    The second pass begins with the inputs, the buffers and the RNG state of the first, and its changes to them are
    discarded. Raises UsageError, in the backward pass, if other code has changed an input in place.
    """
    choosing: dict[str, Any] = {"context_fn": _chosen} if selective else {}
    habits = _Habits()

    def call(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = arguments
        return forward(*args, **kwargs)

    def forward_twice(*args: Any, **kwargs: Any) -> Any:
        # One positional argument: torch saves the RNG state only of devices that it finds in positional arguments.
        arguments = args, kwargs
        if torch.compiler.is_compiling():
            # The recomputation of traced code has no side effects.
            return checkpoint(call, arguments, use_reentrant=False, **choosing)
        if not torch.is_grad_enabled():
            return call(arguments)
        device = next((leaf.device for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)), None)
        there = passes.begin(block, arguments) if passes and device else None
        inputs = _Inputs(type(block).__name__, arguments, habits, there)
        kept = _Kept() if selective else None

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            first, second = (_Keeping(kept), _Giving(kept)) if kept else (nullcontext(), nullcontext())
            return first, _AsBefore(block, inputs, second)

        def pass_(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
            return call(inputs.now(arguments))

        output = checkpoint(pass_, inputs.kept(arguments), use_reentrant=False, context_fn=contexts)
        inputs.after_first_pass()
        if there and device:
            there.end(device)
        if kept:
            kept.after_first_pass()
        return output

    return forward_twice


class _Habits:
    """Places of the inputs that a block changes in place; known after the first pass."""

    changed: frozenset[int] | None = None


class _Inputs:
    """Input tensors of a block for its second pass, with their values from before the first.

    Inputs that the block itself changes in place are copied before the first pass. As long as these are not known, all
    inputs are copied. The others go to the host after the first pass, if there is a pass `there`.
    """

    def __init__(self, block: str, arguments: object, habits: _Habits, there: BlockPass | None) -> None:
        self._block, self._habits, self._there, self.again = block, habits, there, False
        self._all, self._form = tree_flatten(arguments)
        self._versions = {
            place: compat.version(leaf)
            for place, leaf in enumerate(self._all)
            if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) and not leaf.is_inference()
        }
        self._trained = {place for place in self._versions if self._all[place].requires_grad}
        copied = self._versions.keys() if habits.changed is None else self._versions.keys() & habits.changed
        self._copies = {place: self._all[place].detach().clone() for place in copied}
        self._away: dict[int, OnHost] = {}

    def kept(self, arguments: Any) -> Any:
        """Returns what torch keeps for the second pass: the arguments, or an empty tensor on their device.

        torch saves the RNG state of the devices of these tensors.
        """
        if self._there is None:
            return arguments
        return next(leaf for leaf in self._all if isinstance(leaf, Tensor)).new_empty(0)

    def after_first_pass(self) -> None:
        """Drops the copies of inputs that have not changed, and copies these to the host, if it is set."""
        changed = frozenset(place for place, version in self._versions.items() if self._has_changed(place, version))
        self._habits.changed = changed | (self._habits.changed or frozenset())
        if missing := changed - self._copies.keys():
            self._reject(min(missing), "in some passes only")
        self._copies = {place: copy for place, copy in self._copies.items() if place in changed}
        self._versions = {place: self._now(place) for place in self._versions}
        if self._there is None:
            return
        for place in self._versions:
            packed = None if place in self._copies else self._there.pack(self._all[place])
            if isinstance(packed, OnHost):
                self._away[place] = packed
                self._all[place] = None
        self._versions = {place: version for place, version in self._versions.items() if place not in self._away}

    def now(self, arguments: Any) -> Any:
        """Returns the arguments of the current pass."""
        if not self.again:
            return tree_unflatten(self._all, self._form) if self._there else arguments
        for place, version in self._versions.items():
            if place not in self._copies and self._has_changed(place, version):
                self._reject(place, "after the block")
        if not self._copies and not self._away:
            return tree_unflatten(self._all, self._form)
        leaves = list(self._all)
        back = {place: packed.take() for place, packed in self._away.items()}
        for place, copy in (self._copies | back).items():
            # Not a leaf of autograd: leaves that require gradients cannot be changed in place.
            leaves[place] = copy.detach().requires_grad_(place in self._trained).clone()
        return tree_unflatten(leaves, self._form)

    def _now(self, place: int) -> int | None:
        return compat.version(self._tensor(place))

    def _has_changed(self, place: int, version: int | None) -> bool:
        """True if an input was written to since that version, or may have been."""
        return version is None or self._now(place) != version

    def _tensor(self, place: int) -> Tensor:
        leaf: Tensor = self._all[place]
        return leaf

    def _reject(self, place: int, when: str) -> NoReturn:
        raise UsageError(
            f"train.activation_checkpointing: an input of {self._block} (a tensor {list(self._tensor(place).shape)}) "
            f"is changed in place {when}, and the block would be recomputed from the changed values",
            hints=[
                "change a copy of it in the model's forward: write `x = x + y`, not `x += y`",
                "or set train.activation_checkpointing = false",
            ],
        )


# ------------------------------------------------------------------------------------------------- kept results
class _Kept:
    """Results of a first pass for the second, until something writes into them."""

    def __init__(self) -> None:
        self._results: dict[tuple[Any, int], Any] = {}  # by operation, and the number of its call
        self._of: dict[int, tuple[Any, int]] = {}  # by storage
        self._names: list[tuple[tuple[Any, int], weakref.ref[Tensor]]] = []  # tensors in such a storage
        self._versions: list[tuple[tuple[Any, int], Tensor, int | None]] = []

    def keep(self, key: tuple[Any, int], result: Any) -> None:
        """Keeps the result of an operation."""
        # Detached: the graph of `result` holds the kept results, and would keep itself alive.
        self._results[key] = tree_map_only(Tensor, Tensor.detach, result)
        self._of |= {id(storage): key for tensor in tensors_in(result) for storage in storages(tensor)}

    def name(self, result: Any) -> None:
        """Records the tensors that share a storage with a kept result: some views have their own version counter."""
        for tensor in tensors_in(result):
            for storage in storages(tensor):
                if key := self._of.get(id(storage)):
                    self._names.append((key, weakref.ref(tensor)))

    def written(self, tensor: Tensor) -> None:
        """Drops the kept result in the storage of `tensor`."""
        for storage in storages(tensor):
            if key := self._of.pop(id(storage), None):
                self._results.pop(key, None)

    def after_first_pass(self) -> None:
        """Begins to detect writes by torch's version counters."""
        # The mode does not see operations outside of the block.
        with torch.no_grad():
            for key, name in self._names:
                if key in self._results and (tensor := name()) is not None:
                    self._versions.append((key, tensor.detach(), compat.version(tensor)))
        self._names.clear()

    def before_second_pass(self) -> None:
        """Drops the results that were written into since the first pass."""
        for key, tensor, version in self._versions:
            if version is None or compat.version(tensor) != version:
                self._results.pop(key, None)
        self._versions.clear()

    def take(self, key: tuple[Any, int]) -> Any:
        """Returns a kept result, once; None if there is none (a third pass computes everything again)."""
        return self._results.pop(key, None)


class _Keeping(compat.DispatchMode):
    """Mode that keeps the results of costly operations, and of every second matrix product."""

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
            # Not with dropout: a second pass that skips it would give its random numbers to the next operation.
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
    """Mode that returns, in a second pass, the kept results of the first."""

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
    """True if the storages of a tensor are known, so that writes into it are detected."""
    return isinstance(tensor, DTensor) or not compat.is_wrapper(tensor)


def _chosen() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Returns the contexts of selective checkpointing for the compiler. Its traces have no in-place writes."""
    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(_EverySecond())  # type: ignore[no-untyped-call]
    return contexts


class _EverySecond:
    """Policy that keeps the results of costly operations, and of every second matrix product."""

    def __init__(self) -> None:
        self._products = {False: 0, True: 0}  # so far, in the first pass and in the second

    def __call__(self, at: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            self._products[at.is_recompute] += 1
        kept = operation in _COSTLY or (operation in _PRODUCTS and self._products[at.is_recompute] % 2)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


class _AsBefore(AbstractContextManager[None]):
    """Context that restores a module's buffers, and the RNG state of Python and NumPy, from its construction.

    The module gets copies of the buffers, because autograd may still need those of the first pass. torch restores its
    own RNG state. `inner` is entered too.
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
    """Returns copies; entries that are the same tensor get the same copy."""
    made = {id(tensor): tensor.detach().clone() for tensor in tensors if tensor is not None}
    return [made.get(id(tensor)) for tensor in tensors]
