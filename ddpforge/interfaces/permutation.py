"""Stateless permutations and random numbers: every position costs the same, and nothing is stored."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpforge.interfaces.seeds import mix

__all__ = ["draw", "key", "permute"]

_ROUNDS = 6
_ODD = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0xD6E8FEB86659FD93))

Numbers = NDArray[np.uint64]


def permute(places: Numbers, epochs: Numbers, samples: int | Numbers, seed: int) -> Numbers:
    """Returns the samples at `places` of the permutations of `epochs`, in O(1) memory and time per position.

    Each epoch has its own permutation of `range(samples)`: an alternating Feistel network over the next power of two,
    applied until the value is in the range (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        places: Positions in the permutations.
        epochs: Numbers of the permutations, of the same shape as `places`.
        samples: Size of the permutations: one number, or an array of the same shape.
        seed: Seed of all permutations.
    """
    sizes = np.asarray(samples, dtype=np.uint64)
    bits = np.maximum(2, np.frexp((sizes - np.uint64(1)).astype(np.float64))[1])
    low, high = (bits // 2).astype(np.uint64), (bits - bits // 2).astype(np.uint64)
    one = np.uint64(1)
    keys = [_scramble(epochs + np.uint64(mix(seed, turn))) for turn in range(_ROUNDS)]
    network: list[Any] = [low, (one << low) - one, (one << high) - one, *keys]

    ids = _encrypt(places, *network)
    while (outside := np.flatnonzero(ids >= sizes)).size:
        ids[outside] = _encrypt(ids[outside], *(part[outside] if np.ndim(part) else part for part in network))
    return ids


def draw(keys: Numbers, counts: Numbers, seed: int) -> Numbers:
    """Returns a uniform random integer below each of `counts` (less than 2³²), independent for different keys."""
    return (_scramble(_scramble(keys + np.uint64(mix(seed, 0))) ^ keys) * counts) >> np.uint64(32)


def key(*parts: Numbers) -> Numbers:
    """Combines up to three numbers to one key for `permute` or `draw`."""
    total = parts[0] * _ODD[0]
    for part, odd in zip(parts[1:], _ODD[1:], strict=False):
        total = total + part * odd
    return total


def _encrypt(block: Numbers, low: Numbers, low_mask: Numbers, high_mask: Numbers, *keys: Numbers) -> Numbers:
    left, right = block >> low, block & low_mask
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        left = left ^ (_scramble(right ^ key_left) & high_mask)
        right = right ^ (_scramble(left ^ key_right) & low_mask)
    return (left << low) | right


def _scramble(value: Numbers) -> Numbers:
    """Hashes 64-bit words to 32 bits; each output bit depends on every input bit (splitmix64, shortened)."""
    value = (value + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(29))) * np.uint64(0x94D049BB133111EB)
    return value >> np.uint64(32)
