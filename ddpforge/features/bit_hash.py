"""Hashes of the bits of tensors, computed on their device."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

__all__ = ["BitHash", "TensorHashes"]

_CHUNK = 1 << 21  # words of 8 bytes that are hashed at once: bounds the temporary memory
_GOLDEN = 0x9E3779B97F4A7C15  # odd: 2**64 divided by the golden ratio


class BitHash:
    """Hash of a tensor's bits: the sum of its words, each times an odd number of its position, modulo 2**64.

    An odd factor has an inverse modulo 2**64, so any change of one word changes the hash. Computed on the tensor's
    device, with temporary memory for 2**21 words.
    """

    _WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # noqa: RUF012

    def __init__(self) -> None:
        self._factors: dict[torch.device, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """Returns the hash (0-d, int64, on the device); does not wait for the device. Depends on no strides."""
        values = tensor.detach()
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        flat = (values.to_dense() if values.is_sparse else values).contiguous().view(-1)
        size = flat.element_size()
        if flat.numel() * size % 8 == 0:  # eight bytes at once take less than half of the time
            aligned = flat if flat.data_ptr() % 8 == 0 and flat.storage_offset() * size % 8 == 0 else flat.clone()
            words = aligned.view(torch.int64)
        else:
            words = flat.view(self._WORDS[size]).to(torch.int64)
        total = torch.zeros((), dtype=torch.int64, device=flat.device)
        for part in torch.split(words, _CHUNK):
            total = (part * self._of_positions(len(part), flat.device)).sum() + total * _signed(_GOLDEN)
        return total

    def _of_positions(self, count: int, device: torch.device) -> Tensor:
        known = self._factors.get(device)
        if known is None or len(known) < count:
            positions = torch.arange(1, min(_CHUNK, 2 * count) + 1, dtype=torch.int64, device=device)
            mixed = positions * _signed(_GOLDEN)
            mixed = (mixed ^ (mixed >> 29)) * _signed(0xBF58476D1CE4E5B9)
            known = self._factors[device] = mixed ^ (mixed >> 32) | 1
        return known[:count]


def _signed(number: int) -> int:
    """Returns a number of 64 bits as torch's int64 reads it."""
    return number - 2**64 if number >= 2**63 else number


class TensorHashes:
    """Hashes of named tensors, on the host."""

    def __init__(self, hashes: Mapping[str, Tensor]) -> None:
        device = next((one.device for one in hashes.values() if one.device.type != "cpu"), torch.device("cpu"))
        numbers = torch.stack([one.to(device) for one in hashes.values()]).tolist() if hashes else []
        self.by_name: dict[str, int] = dict(zip(hashes, numbers, strict=True))
        text = repr(sorted(self.by_name.items())).encode()
        self.digest = hashlib.blake2b(text, digest_size=8).hexdigest()
