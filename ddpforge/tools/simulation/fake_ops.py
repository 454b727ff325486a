"""Results of operations on fake tensors that torch's own mode cannot compute, or computes slowly."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = ["FakeOps"]

_Shape = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device] | None
_PLAIN = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None))
_BY_VALUE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class FakeOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Returns the values that code reads from fake tensors, makes views quickly, and caches the shapes of results."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        # Torch has such a cache, too, but its key contains everything that is known about the arguments. That takes
        # several times as long, and weights that are pieces of one buffer differ in their offset.
        self._known: dict[Hashable, Sequence[_Shape]] = {}
        self._members: dict[torch.device, Mapping[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten, kwargs = torch.ops.aten, kwargs or {}
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            if func is aten._local_scalar_dense.default:
                return _answer(first)
            if func is aten.equal.default:
                return True
            if func is aten.nonzero.default:  # at most: every element
                return torch.empty(first.numel(), first.dim(), dtype=torch.int64, device=first.device)
            if func is aten.masked_select.default:
                return torch.empty(first.numel(), dtype=first.dtype, device=first.device)
            if first.constant is None:
                form = _form(func)
                if form == "in place":
                    return first
                if form == "view":
                    return self._view(first, func, args, kwargs)
        if _form(func) == "new":
            return self._new(func, args, kwargs)
        return func(*args, **kwargs)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, see `MemoryTracker`."""
        return False

    def _view(self, of: FakeTensor, func: Any, args: Any, kwargs: Any) -> Any:
        """Makes views as the operation does for tensors on the meta device."""
        with in_kernel_invocation_manager(self._mode):
            found = func(*args, **kwargs)
        if isinstance(found, Tensor):
            return self._fake(found, of.fake_device)
        return tree_map_only(Tensor, lambda one: self._fake(one, of.fake_device), found)

    def _new(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the new tensors of an operation; their shapes follow from the shapes of its arguments."""
        try:
            key = func, _key(args), tuple((name, _key(value)) for name, value in kwargs.items())
        except _NoKey:
            return func(*args, **kwargs)
        if (known := self._known.get(key)) is None:
            found = func(*args, **kwargs)
            made = found if isinstance(found, tuple) else (found,)
            if all(one is None or _is_plain(one) for one in made):
                self._known[key] = [None if one is None else _shape(one) for one in made]
            return found
        made = tuple(self._made(*one) if one else None for one in known)
        return made if len(func._schema.returns) > 1 else made[0]

    def _made(self, shape: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> FakeTensor:
        with torch._C._DisableTorchDispatch():
            memory = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        return self._fake(memory, device)

    def _fake(self, memory: Tensor, device: torch.device) -> FakeTensor:
        """Returns a fake tensor on `device` for a meta tensor, like torch's, in a quarter of the time."""
        if (members := self._members.get(device)) is None:
            members = self._members[device] = dict(vars(FakeTensor(self._mode, memory, device)))
        made: FakeTensor = Tensor._make_subclass(
            FakeTensor, memory, False, dispatch_device=True, device_for_backend_keys=device
        )
        made.__dict__.update(members)
        return made


class _NoKey(Exception):
    """Raised if the form of an argument does not determine the result."""


def _key(one: Any) -> Hashable:
    if isinstance(one, FakeTensor):
        if one.constant is not None or not _is_dense(one):
            raise _NoKey
        return _shape(one)
    if isinstance(one, Tensor):
        raise _NoKey
    if isinstance(one, list | tuple):
        return tuple(map(_key, one))
    if isinstance(one, _PLAIN):
        return type(one), one
    raise _NoKey


def _shape(one: FakeTensor) -> _Shape:
    return one.shape, one.stride(), one.dtype, one.fake_device


def _is_dense(one: FakeTensor) -> bool:
    return one.layout is torch.strided and not one.dtype.is_complex


def _is_plain(one: Any) -> bool:
    """True for a tensor that covers all of its memory, from the first element on."""
    if not isinstance(one, FakeTensor) or one.constant is not None or not _is_dense(one) or one.storage_offset():
        return False
    last = sum((size - 1) * stride for size, stride in zip(one.shape, one.stride(), strict=True)) + 1
    return one.untyped_storage().nbytes() == (last if one.numel() else 0) * one.element_size()


@functools.cache
def _form(func: Any) -> Literal["new", "in place", "view", "other"]:
    """Classifies operations by their results: new tensors, the first argument changed in place, or views of it."""
    given, made = func._schema.arguments, func._schema.returns
    aliases = [one.alias_info for one in (*given, *made) if one.alias_info]
    tensor = torch._C.TensorType.get()
    if not aliases:
        tensors = bool(made) and all(one.type.isSubtypeOf(tensor) for one in made)
        return "new" if tensors and func.namespace == "aten" and _BY_VALUE.isdisjoint(func.tags) else "other"
    if not made or not given[0].alias_info or torch.Tag.inplace_view in func.tags:
        return "other"
    if len(aliases) == 2 and all(one.is_write for one in aliases):
        return "in place"
    of_first = not any(one.is_write for one in aliases) and len(aliases) == 1 + len(made)
    return "view" if of_first and not any(one.type.isSubtypeOf(tensor) for one in given[1:]) else "other"


def _answer(one: FakeTensor) -> bool | float | int:
    if one.constant is not None:
        number: bool | float | int = one.constant.item()
        return number
    if one.dtype == torch.bool:
        return False
    # An element of a larger tensor is from a comparison of ranks, which must find no difference: 0.
    alone = one.untyped_storage().nbytes() == one.element_size()
    return (1.0 if alone else 0.0) if one.is_floating_point() else 0
