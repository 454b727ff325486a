"""Seeds, saves and restores the RNGs of Python, NumPy and torch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ddpforge.interfaces import device_kind

__all__ = ["RandomState", "isolated_rng", "seed_all"]


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seeds the RNGs of Python, NumPy and torch on the CPU, and that of `device`."""
    # Not `torch.manual_seed`: it also visits every possible backend, which takes a hundred times as long, at each step.
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and not (kind := device_kind(device)).is_host:
        kind.seed(seed, device)


class RandomState:
    """Saved state of the RNGs of Python, NumPy and torch on the CPU."""

    def __init__(self, seed: int) -> None:
        seed_all(seed)
        self.keep()

    @classmethod
    def now(cls) -> RandomState:
        """Returns the current state of the RNGs."""
        state = cls.__new__(cls)
        state.keep()
        return state

    def keep(self) -> None:
        """Saves the current state of the RNGs."""
        self._python = random.getstate()
        self._numpy: dict[str, Any] = np.random.get_state(legacy=False)
        self._torch = torch.default_generator.get_state()

    def resume(self) -> None:
        """Restores the saved state of the RNGs."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)


@contextmanager
def isolated_rng() -> Iterator[None]:
    """Restores the RNGs of Python, NumPy and torch on exit."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.resume()
