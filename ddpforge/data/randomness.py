"""The generators of random numbers that seeds are given to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["RandomState", "own_random_numbers", "seed_all"]


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seeds python's, numpy's and torch's generators, and that of `device` where it has its own.

    Reaches the generators directly: `torch.manual_seed` also visits every backend that might exist, which costs a
    hundred times as much and would be felt at every step.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class RandomState:
    """A state of python's, numpy's and torch's generators that outlasts other uses of them."""

    def __init__(self, seed: int) -> None:
        seed_all(seed)
        self.keep()

    @classmethod
    def now(cls) -> RandomState:
        """The state of the generators at this moment."""
        state = cls.__new__(cls)
        state.keep()
        return state

    def keep(self) -> None:
        """Takes down where the generators stand."""
        self._python = random.getstate()
        self._numpy: dict[str, Any] = np.random.get_state(legacy=False)
        self._torch = torch.default_generator.get_state()

    def resume(self) -> None:
        """Puts the generators back to where they stood."""
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.default_generator.set_state(self._torch)


@contextmanager
def own_random_numbers() -> Iterator[None]:
    """Leaves python's, numpy's and torch's generators as they were."""
    state = RandomState.now()
    try:
        yield
    finally:
        state.resume()
