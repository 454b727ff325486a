"""Gradient norms, looked at as seldom as possible: reading one waits for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["GradientNorms"]


class GradientNorms:
    """The gradient norms of the steps since they were last taken."""

    def __init__(self) -> None:
        self.newest = math.nan  # of those that were taken
        self.nonfinite_in_a_row = 0
        self._pending: dict[int, Tensor] = {}

    def add(self, step: int, norm: Tensor) -> None:
        """Notes the norm of a step (0-d, on any device); does not wait for it."""
        self._pending[step] = norm

    def take(self) -> list[int]:
        """Takes all norms in one transfer from the device; returns the steps whose norm was not finite."""
        if not self._pending:
            return []
        bad: list[int] = []
        norms = list(self._pending.values())
        values: list[float] = torch.stack(norms).tolist() if len(norms) > 1 else [norms[0].item()]
        for step, value in zip(self._pending, values, strict=True):
            self.nonfinite_in_a_row = 0 if math.isfinite(value) else self.nonfinite_in_a_row + 1
            if self.nonfinite_in_a_row:
                bad.append(step)
        self.newest = values[-1]
        self._pending.clear()
        return bad
