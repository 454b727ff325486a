"""Seeds that are derived from several integers."""

from __future__ import annotations

__all__ = ["mix"]

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hashes several integers to a 63-bit seed (with the finalizer of splitmix64, Steele et al. 2014)."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
