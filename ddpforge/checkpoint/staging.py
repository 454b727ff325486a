"""Copies a rank's part of a checkpoint to host memory, which all saves reuse."""

import functools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
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

_SMALL = 1 << 16  # bytes: a single copy of a larger part is as fast
_MOST = 1 << 24  # bytes of a batch of small parts: a GPU gathers them in its memory first
_FEW = 16  # parts: fewer are not worth a batch

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
        self._live: list[_Batch] = []  # a GPU may still copy them: they must neither change nor be freed
        self._host = ThreadPoolExecutor(1, "copy for a checkpoint")
        self._copied: Future[None] | None = None  # the copy of tensors in host memory

    def reserve(self, held: Held) -> None:
        """Allocates memory for a copy of `held` in a thread, if a part is on a GPU."""
        # Page-locking takes half a second per gigabyte.
        batches = _batches(held)
        if kind := _locks(batches):
            # If there is not enough memory, the first copy raises the error.
            def take() -> None:
                with suppress(CheckpointError):
                    self._bytes(_size(batches), locked=kind)

            self._reserving = Thread(target=take, name="page-locking for checkpoints", daemon=True)
            self._reserving.start()

    def copy(self, held: Held) -> Callable[[], Held]:
        """Begins a copy to host memory; returns a function that returns its parts: call it after `wait`.

        When this returns, operations on the current stream of a GPU may change the tensors, except trained weights and
        their optimizer state. Those are copied during the next forward and backward passes: call `before_update`
        before they change. Raises CheckpointError if there is not enough memory.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        batches = _batches(held)
        gpus, kind = _gpus(batches), _locks(batches)
        self._finish_on_host()  # a failed save may not have waited for its copy
        memory = self._bytes(_size(batches), locked=kind)
        pieces: list[tuple[_Batch, Tensor]] = []
        begin = 0
        for batch in batches:
            pieces.append((batch, memory[begin : begin + batch.nbytes].view(batch.parts[0].tensor.dtype)))
            begin += _aligned(batch.nbytes)

        def fill(chosen: Iterable[tuple[_Batch, Tensor]]) -> None:
            with torch.no_grad():
                for batch, piece in chosen:
                    batch.copy_to(piece)

        later = [each for each in pieces if each[0].may_wait]
        with _aside(gpus):
            fill(each for each in pieces if not each[0].may_wait)
        for gpu in gpus:
            device_kind(gpu).current_stream(gpu).wait_stream(_stream_for_copies(gpu))
        with _aside(gpus):
            fill(each for each in later if _gpus([each[0]]))
        self._ends = {gpu: _stream_for_copies(gpu).record_event(device_kind(gpu).new_event()) for gpu in gpus}
        self._live = batches if gpus else []
        self._copied = self._host.submit(fill, [each for each in later if not _gpus([each[0]])])

        def copied() -> Held:
            found = {id(part): part.of(copy) for batch, piece in pieces for part, copy in batch.pieces(piece)}
            return {
                section: {name: [found[id(part)] for part in parts] for name, parts in named.items()}
                for section, named in held.items()
            }

        return copied

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


@dataclass
class _Batch:
    """Parts that are copied at once: of one device and dtype, with shapes that differ in the first dimension only.

    `may_wait`: True if they may be copied during the next passes.
    """

    parts: list[TensorShard]
    nbytes: int
    may_wait: bool

    def copy_to(self, piece: Tensor) -> None:
        """Copies all parts to `piece`, host memory in one dimension."""
        tensors = [part.tensor for part in self.parts]
        first = tensors[0]
        kind = device_kind(first.device)
        if len(tensors) == 1:
            piece.view(first.shape).copy_(first, non_blocking=kind.has_streams)
        elif kind.is_host:
            torch.cat(tensors, out=piece.view(-1, *first.shape[1:]))
        else:
            piece.view(-1, *first.shape[1:]).copy_(torch.cat(tensors), non_blocking=kind.has_streams)

    def single(self) -> list["_Batch"]:
        """Returns a batch for each part."""
        return [_Batch([part], part.tensor.nbytes, self.may_wait) for part in self.parts]

    def pieces(self, piece: Tensor) -> Iterator[tuple[TensorShard, Tensor]]:
        """Yields each part with its view of the memory `piece`."""
        if len(self.parts) == 1:
            yield self.parts[0], piece.view(self.parts[0].tensor.shape)
            return
        rows = piece.view(-1, *self.parts[0].tensor.shape[1:])
        yield from zip(self.parts, rows.split_with_sizes([part.tensor.shape[0] for part in self.parts]), strict=True)


def _batches(held: Held) -> list[_Batch]:
    """Divides all parts into batches; large parts, and few ones of a kind, are alone in theirs.

    Updates alone change weights with optimizer state, and that state: these may wait. Buffers, tensors of callbacks,
    and optimizer state that belongs to no weight change in passes or between steps, too.
    """
    updated = {OPTIMIZER.cut(name, "/")[0] for name in held["optimizer"]} - {SHARED}
    found: list[_Batch] = []
    filling: dict[tuple[object, ...], _Batch] = {}
    for section, named in held.items():
        for name, parts in named.items():
            owner = name if section == "model" else OPTIMIZER.cut(name, "/")[0]
            trained = section != "callbacks" and owner in updated
            for part in parts:
                tensor = part.tensor
                size, shape, device = tensor.nbytes, tensor.shape, tensor.device
                if not 0 < size < _SMALL or not shape:
                    found.append(_Batch([part], size, trained and _may_wait(device)))
                    continue
                key = trained, device, tensor.dtype, shape[1:]
                batch = filling.get(key)
                if batch is None or batch.nbytes > _MOST:
                    batch = filling[key] = _Batch([], 0, trained and _may_wait(device))
                    found.append(batch)
                batch.parts.append(part)
                batch.nbytes += size
    return [each for batch in found for each in ([batch] if len(batch.parts) >= _FEW else batch.single())]


def _gpus(batches: Iterable[_Batch]) -> set[torch.device]:
    devices = {batch.parts[0].tensor.device for batch in batches}
    return {device for device in devices if device_kind(device).has_streams}


def _locks(batches: Iterable[_Batch]) -> DeviceKind | None:
    """Returns the kind of devices that copies to page-locked memory; None if no part is on such a device."""
    return next((kind for gpu in _gpus(batches) if (kind := device_kind(gpu)).pins), None)


def _may_wait(device: torch.device) -> bool:
    """True if a part can be copied during the next passes: on another stream, or by a thread of the host.

    A device without streams would copy between the operations of these passes, and wait for each copy.
    """
    kind = device_kind(device)
    return kind.has_streams or kind.is_host


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


def _size(batches: Iterable[_Batch]) -> int:
    return sum(_aligned(batch.nbytes) for batch in batches)


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


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
