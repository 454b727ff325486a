"""Activation offload: what autograd saves in a block waits in host memory for the backward pass.

The copies have a stream of their own. A block begins when the copies of the block before the last one are done, so the
device holds the saved tensors of two blocks. In the backward pass the copies to the device are one block ahead.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ddpforge import compat
from ddpforge.compat import tree_leaves
from ddpforge.errors import UsageError
from ddpforge.features.memory_tracker import is_fake, storages
from ddpforge.interfaces.device import device_kind

__all__ = ["BlockPass", "OnHost", "PassesOnHost", "offloaded"]

log = logging.getLogger("ddpforge")

SMALLEST = 1 << 12
"""Bytes of the smallest tensor that is copied: for a smaller one, the calls cost more than its memory is worth."""


class PassesOnHost:
    """Forward passes of the blocks of one model, in their order."""

    def __init__(self) -> None:
        self._last: weakref.ref[BlockPass] | None = None

    def begin(self, block: nn.Module, arguments: object) -> BlockPass:
        """Begins a pass of `block`, after the copies of the pass before the last one. Warns once on a CPU."""
        last = self._last() if self._last else None
        given = tensors_of(arguments)
        if self._last is None and given and given[0].device.type == "cpu" and not is_fake(given[0]):
            log.warning("train.activation_offload: activations on a CPU are in host memory; here it only copies them")
        if last and (older := last.previous):
            older.end_copies()
        found = BlockPass(block, arguments, last)
        self._last = weakref.ref(found)
        return found


class BlockPass:
    """Tensors of one forward pass of a block that are in host memory."""

    def __init__(self, block: nn.Module, arguments: object, previous: BlockPass | None) -> None:
        self._previous = weakref.ref(previous) if previous else None
        self._copied: Any = None
        self._loaded: Any = None
        self._there: list[weakref.ref[OnHost]] = []
        # Weak: the graph owns the copies, so that they end with it, also without a backward pass.
        self._sources: dict[tuple[Any, ...], tuple[Tensor, weakref.ref[OnHost]]] = {}
        self._name = type(block).__name__
        # Weights, buffers and inputs without gradients, such as masks, stay: others hold them, too.
        shared = [tensor for tensor in tensors_of(arguments) if not tensor.requires_grad]
        self._stay = [*shared, *block.parameters(), *block.buffers()]

    @property
    def previous(self) -> BlockPass | None:
        """Returns the pass before this one, if its tensors are still needed."""
        return self._previous() if self._previous else None

    def pack(self, tensor: Tensor) -> Tensor | OnHost:
        """Copies a tensor to the host, once for each version; returns it unchanged if it stays on the device."""
        if not self.leaves(tensor):
            return tensor
        # The sources are alive until the pass ends, so that no other tensor can get their address.
        place = (id(storages(tensor)[0]), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        key = (*place, compat.version(tensor))
        known = self._sources[key][1]() if key in self._sources else None
        if known is not None:
            known.uses += 1
            return known
        found = OnHost(tensor, self)
        self._sources[key] = tensor.detach(), weakref.ref(found)
        return found

    def leaves(self, tensor: Tensor) -> bool:
        """True if the tensor goes to the host."""
        if compat.is_wrapper(tensor) and not isinstance(tensor, DTensor):
            return False
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if local.layout is not torch.strided or local.numel() * local.element_size() < SMALLEST:
            return False
        # Weights are compared now: ZeRO-3 gathers them within the block.
        return id(storages(local)[0]) not in {id(storage) for one in self._stay for storage in storages(one)}

    def add(self, tensor: OnHost) -> None:
        """Adds a tensor that `load` copies to the device."""
        self._there.append(weakref.ref(tensor))

    def end(self, device: torch.device) -> None:
        """Marks the end of the forward pass: no more copies to the host follow."""
        self._stay.clear()
        if (kind := device_kind(device)).has_streams:
            self._copied = _stream(device).record_event(kind.new_event())

    def end_copies(self) -> None:
        """Lets the device wait for the copies to the host, then drops their sources.

        Raises UsageError if one of them has been changed in place, because the copy may have either value.
        """
        if self._copied is not None and self._sources:
            device = next(source.device for source, _ in self._sources.values())
            device_kind(device).current_stream(device).wait_event(self._copied)
        for (*_, version), (source, _) in self._sources.items():
            if compat.version(source) != version:
                raise UsageError(
                    f"train.activation_offload: a tensor {list(source.shape)} that {self._name} needs in the backward "
                    "pass is changed in place after its forward operation",
                    hints=["write `x = x + y`, not `x += y`", "or set train.activation_offload = false"],
                )
        self._sources.clear()

    def load(self, device: torch.device) -> None:
        """Lets the device wait for its tensors; starts their copies and those of the pass before."""
        if self._loaded is None:
            self._start(device)
            if before := self.previous:
                before._start(device)
        if device_kind(device).has_streams:
            device_kind(device).current_stream(device).wait_event(self._loaded)

    def _start(self, device: torch.device) -> None:
        if self._loaded is not None:
            return
        self.end_copies()
        for one in self._there:
            if tensor := one():
                tensor.load()
        kind = device_kind(device)
        self._loaded = _stream(device).record_event(kind.new_event()) if kind.has_streams else True


class OnHost:
    """Tensor in host memory. `uses`: how often the backward pass takes it; then it leaves the device."""

    def __init__(self, tensor: Tensor, of: BlockPass) -> None:
        self._of, self.uses = of, 1
        self._form = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        self._whole = tensor.shape, tensor.stride()
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        self._device = local.device
        self._back: Tensor | None = None
        host = "meta" if is_fake(local) else "cpu"  # a simulated step counts the memory of the device alone
        self._host = torch.empty_like(local, device=host, pin_memory=device_kind(local.device).pins)
        with _aside(local.device) as stream:
            self._host.copy_(local, non_blocking=True)
        if stream is not None:
            local.record_stream(stream)  # a strategy may free weights that it has gathered
        of.add(self)

    def load(self) -> None:
        """Starts the copy to the device."""
        if self._back is None:
            back = torch.empty_like(self._host, device=self._device, pin_memory=False)
            with _aside(self._device) as stream:
                back.copy_(self._host, non_blocking=True)
            if stream is not None:
                back.record_stream(stream)
            self._back = back

    def take(self) -> Tensor:
        """Returns the tensor on the device."""
        self._of.load(self._device)
        again = self._back is None  # a second backward pass of the same graph
        self.load()
        if again and (kind := device_kind(self._device)).has_streams:
            kind.current_stream(self._device).wait_stream(_stream(self._device))
        back, self.uses = self._back, self.uses - 1
        assert back is not None
        if self.uses <= 0:
            self._back = None
        if self._form is None:
            return back
        shape, stride = self._whole
        return DTensor.from_local(back, *self._form, run_check=False, shape=shape, stride=stride)


def offloaded(block: nn.Module, forward: Callable[..., Any], passes: PassesOnHost) -> Callable[..., Any]:
    """Returns a `forward` of `block` whose saved tensors are in host memory until the backward pass."""

    def on_host(*args: Any, **kwargs: Any) -> Any:
        device = next((tensor.device for tensor in tensors_of((args, kwargs))), None)
        if device is None or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        now = passes.begin(block, (args, kwargs))
        with saved_tensors_hooks(now.pack, _unpack):
            output = forward(*args, **kwargs)
        now.end(device)
        return output

    return on_host


def tensors_of(arguments: object) -> list[Tensor]:
    """Returns the tensors in the arguments of a module."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _unpack(packed: Tensor | OnHost) -> Tensor:
    return packed.take() if isinstance(packed, OnHost) else packed


_streams: dict[torch.device, Any] = {}


def _stream(device: torch.device) -> Any:
    """Returns the stream for copies of a device."""
    if device not in _streams:
        _streams[device] = device_kind(device).new_stream(device)
    return _streams[device]


@contextmanager
def _aside(device: torch.device) -> Iterator[Any]:
    """Runs copies on the stream for them, after the work so far; None if the device has no streams."""
    kind = device_kind(device)
    if not kind.has_streams:
        yield None
        return
    stream = _stream(device)
    stream.wait_stream(kind.current_stream(device))
    with kind.on_stream(stream):
        yield stream
