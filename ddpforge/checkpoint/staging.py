"""A copy of what a rank is about to write, in host memory that every save uses again."""

import logging
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ddpforge.checkpoint.contents import Held
from ddpforge.errors import CheckpointError
from ddpforge.interfaces.regions import Part

log = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes: of any dtype, and of a cache line

_HINT = "save without a copy, while training waits: checkpoint.background = false"


class Staging:
    """Host memory for one copy, page-locked where there is something on a GPU, if the machine allows it.

    The memory is taken at the first copy and grows when more is to be copied; each copy overwrites the one before.
    """

    def __init__(self) -> None:
        self._memory: _Memory | None = None

    def copy(self, held: Held) -> Held:
        """The same parts in host memory, independent of the tensors that they came from when this returns.

        Raises CheckpointError when there is not enough memory.
        """
        parts = [part for section in held.values() for found in section.values() for part in found]
        gpus = {part.tensor.device for part in parts if part.tensor.is_cuda}
        size = sum(_aligned(part.tensor.nbytes) for part in parts)
        pieces = _pieces(self._bytes(size, locked=bool(gpus)), parts)
        copied = {
            section: {name: [_filled(next(pieces), part) for part in found] for name, found in named.items()}
            for section, named in held.items()
        }
        for gpu in gpus:
            torch.cuda.current_stream(gpu).synchronize()
        return copied

    def _bytes(self, size: int, *, locked: bool) -> Tensor:
        if self._memory is None or size > len(self._memory.bytes) or (locked and not self._memory.asked):
            self._memory = None  # first of all: there may be no room for both
            self._memory = _Memory(size, locked=locked)
        return self._memory.bytes


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _pieces(memory: Tensor, parts: list[Part]) -> Iterator[Tensor]:
    """A place in memory for each part."""
    begin = 0
    for part in parts:
        source = part.tensor
        yield memory[begin : begin + source.nbytes].view(source.dtype).view(source.shape)
        begin += _aligned(source.nbytes)


def _filled(piece: Tensor, part: Part) -> Part:
    source = part.tensor.detach()
    piece.copy_(source, non_blocking=source.is_cuda)
    return part.of(piece)


class _Memory:
    """Bytes in host memory."""

    def __init__(self, size: int, *, locked: bool) -> None:
        try:
            self.bytes = torch.empty(size, dtype=torch.uint8)
        except RuntimeError as error:
            raise CheckpointError(f"there is no host memory for a copy of {size:,} bytes", hints=[_HINT]) from error
        # Not `pin_memory=True`, which takes up to twice the size: a power of two.
        self.asked = locked
        if locked and size:
            address = self.bytes.data_ptr()
            if code := int(_cuda().cudaHostRegister(address, size, 1)):
                log.warning(
                    "%s bytes of host memory could not be page-locked (CUDA error %d): copies for checkpoints take "
                    "longer; `ulimit -l` says how much may be",
                    *(f"{size:,}", code),
                )
                _forget_error()
                return
            weakref.finalize(self, _unlock, address).atexit = False  # then the driver does it


def _forget_error() -> None:
    """CUDA keeps an error until it has been reported, be it by the next kernel, which has nothing to do with it."""
    with suppress(RuntimeError, AssertionError):
        torch.zeros((), device="cuda")


def _unlock(address: int) -> None:
    _cuda().cudaHostUnregister(address)


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
