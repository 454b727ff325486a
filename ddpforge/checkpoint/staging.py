"""Copies a rank's part of a checkpoint to host memory, which all saves reuse."""

import functools
import logging
import weakref
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from ddpforge.checkpoint.state import OPTIMIZER, SHARED, Held
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import DeviceKind, device_kind
from ddpforge.interfaces.regions import TensorShard
from ddpforge.machine import map_without_forks

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: of any dtype, and of a cache line

_HINT = "set checkpoint.async_save = false: it saves without a copy, while training waits"


class Staging:
    """Host memory for one copy; page-locked if tensors are on a GPU and the machine allows it.

    The first copy, or `reserve`, allocates the memory. It grows if a later copy is larger. Each copy overwrites
    the previous one. GPUs copy on separate streams, see
    https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams; the host copies in a thread.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None
        self._reserving: Thread | None = None
        self._ends: dict[torch.device, Any] = {}  # ends of the newest copies
        self._live: list[TensorShard] = []  # a GPU may still copy them: they must neither change nor be freed
        self._host = ThreadPoolExecutor(1, "copy for a checkpoint")
        self._copied: Future[None] | None = None  # the copy of tensors in host memory

    def reserve(self, held: Held) -> None:
        """Allocates memory for a copy of `held` in a thread, if a part is on a GPU."""
        # Page-locking takes half a second per gigabyte.
        parts = [part for _, _, part in _each(held)]
        if kind := _locks(parts):
            # If there is not enough memory, the first copy raises the error.
            def take() -> None:
                with suppress(CheckpointError):
                    self._bytes(_size(parts), locked=kind)

            self._reserving = Thread(target=take, name="page-locking for checkpoints", daemon=True)
            self._reserving.start()

    def copy(self, held: Held) -> Held:
        """Begins a copy to host memory; returns the parts of the copy, which are complete when `wait` has returned.

        When this returns, operations on the current stream of a GPU may change the tensors, except trained weights and
        their optimizer state. Those are copied during the next forward and backward passes: call `before_update`
        before they change. Raises CheckpointError if there is not enough memory.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        parts = [part for _, _, part in _each(held)]
        gpus, kind = _gpus(parts), _locks(parts)
        self._finish_on_host()  # a failed save may not have waited for its copy
        pieces = dict(zip(map(id, parts), _pieces(self._bytes(_size(parts), locked=kind), parts), strict=True))

        def fill(chosen: Iterable[TensorShard]) -> None:
            for part in chosen:
                source = part.tensor.detach()
                pieces[id(part)].copy_(source, non_blocking=device_kind(source.device).has_streams)

        updated = _only_updated(held)
        later = [part for part in parts if id(part) in updated and _may_wait(part)]
        waiting = {*map(id, later)}
        with _aside(gpus):
            fill(part for part in parts if id(part) not in waiting)
        for gpu in gpus:
            device_kind(gpu).current_stream(gpu).wait_stream(_stream_for_copies(gpu))
        with _aside(gpus):
            fill(part for part in later if _gpus([part]))
        self._ends = {gpu: _stream_for_copies(gpu).record_event(device_kind(gpu).new_event()) for gpu in gpus}
        self._live = parts if gpus else []
        self._copied = self._host.submit(fill, [part for part in later if not _gpus([part])])
        return {
            section: {name: [part.of(pieces[id(part)]) for part in found] for name, found in named.items()}
            for section, named in held.items()
        }

    def before_update(self) -> None:
        """Makes the current stream of each GPU wait for its copy, and waits for the copy on the host."""
        self._finish_on_host()
        if self._live:
            for gpu, end in self._ends.items():
                device_kind(gpu).current_stream(gpu).wait_event(end)
            self._live = []

    def _finish_on_host(self) -> None:
        if self._copied is not None:
            self._copied.result()
            self._copied = None

    def wait(self) -> None:
        """Waits until the copy is complete. Called in the thread that writes, not in the one that trains."""
        if (copied := self._copied) is not None:
            copied.result()
        for end in self._ends.values():
            end.synchronize()

    def _bytes(self, size: int, *, locked: DeviceKind | None) -> Tensor:
        if self._memory is None or size > len(self._memory.bytes) or (locked and not self._memory.locked):
            self.wait()  # a failed save may not have waited for its copy
            self._memory = None  # free it first: there may be no room for both
            self._memory = _Memory(size, locked=locked)
        return self._memory.bytes


def _each(held: Held) -> Iterator[tuple[str, str, TensorShard]]:
    """Yields section, name and part of all tensors."""
    for section, named in held.items():
        for name, parts in named.items():
            yield from ((section, name, part) for part in parts)


def _gpus(parts: Iterable[TensorShard]) -> set[torch.device]:
    return {part.tensor.device for part in parts if device_kind(part.tensor.device).has_streams}


def _locks(parts: Iterable[TensorShard]) -> DeviceKind | None:
    """Returns the kind of devices that copies to page-locked memory; None if no part is on such a device."""
    return next((kind for gpu in _gpus(parts) if (kind := device_kind(gpu)).pins), None)


def _may_wait(part: TensorShard) -> bool:
    """True if a part can be copied during the next passes: on another stream, or by a thread of the host.

    A device without streams would copy between the operations of these passes, and wait for each copy.
    """
    kind = device_kind(part.tensor.device)
    return kind.has_streams or kind.is_host


def _only_updated(held: Held) -> set[int]:
    """Returns the ids of parts that only updates change: weights with optimizer state, and that state.

    Excludes buffers, tensors of callbacks, and optimizer state that belongs to no weight:
    these also change in passes or between steps.
    """
    owners = {OPTIMIZER.cut(name, "/")[0] for name in held["optimizer"]} - {SHARED}
    return {
        id(part)
        for section, name, part in _each(held)
        if (section == "model" and name in owners) or (section == "optimizer" and OPTIMIZER.cut(name, "/")[0] in owners)
    }


@contextmanager
def _aside(gpus: Iterable[torch.device]) -> Iterator[None]:
    """Makes the copy streams of the GPUs current; each first waits for the work queued on its current stream."""
    with ExitStack() as stack:
        for gpu in gpus:
            aside, kind = _stream_for_copies(gpu), device_kind(gpu)
            aside.wait_stream(kind.current_stream(gpu))
            stack.enter_context(kind.on_stream(aside))
        yield


@functools.cache
def _stream_for_copies(gpu: torch.device) -> Any:
    return device_kind(gpu).new_stream(gpu)


def _size(parts: Iterable[TensorShard]) -> int:
    return sum(_aligned(part.tensor.nbytes) for part in parts)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _pieces(memory: Tensor, parts: list[TensorShard]) -> Iterator[Tensor]:
    """Yields a view of `memory` for each part, with the part's dtype and shape."""
    begin = 0
    for part in parts:
        source = part.tensor
        yield memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
        begin += _aligned(source.nbytes)


class _Memory:
    """Bytes in host memory, page-locked for the kind `locked` of devices, if the machine allows it."""

    def __init__(self, size: int, *, locked: DeviceKind | None) -> None:
        # Only CUDA locks memory that exists. `pin_memory=True` takes up to twice the size: a power of two.
        registers = locked is not None and locked.type == "cuda"
        try:
            if registers and size:
                self.bytes = torch.frombuffer(map_without_forks(size), dtype=torch.uint8)
            else:
                self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=locked is not None and not registers)
        except (RuntimeError, OSError) as error:
            raise CheckpointError(f"not enough host memory for a copy of {size:,} bytes", hints=[_HINT]) from error
        self.locked = locked
        if registers and size:
            address = self.bytes.data_ptr()
            if code := int(_cuda().cudaHostRegister(address, size, 1)):
                log.warning(
                    "%s bytes of host memory could not be page-locked (CUDA error %d): copies for checkpoints take "
                    "longer; `ulimit -l` prints the limit",
                    *(f"{size:,}", code),
                )
                with suppress(RuntimeError, AssertionError):
                    torch.zeros((), device="cuda")  # clears CUDA's last error: the next kernel would report it
                return
            weakref.finalize(self, _unlock, address).atexit = False  # at exit the driver does it


def _unlock(address: int) -> None:
    _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
