"""Learning-rate schedules, and multi-pass optimizers such as SAM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["MultiPassOptimizer", "Schedule"]

Schedule = Callable[[int], float]
"""Pure function that maps a step (0 for the first) to a factor on the recipe's learning rate."""


@runtime_checkable
class MultiPassOptimizer(Protocol):
    """Multi-pass optimizer: computes the gradient of a step more than once, at different weights (e.g. SAM).

    It is a `torch.optim.Optimizer` with `passes` > 1; the trainer reads `passes` once. In each pass it computes the
    gradient of the whole step, with the same micro-batches and the same random numbers. After every pass except the
    last it calls `perturb`. After the last pass it calls `restore`, then `step` with the last gradient.

    The logged loss and the buffers come from the first pass. The logged norm is that of the last gradient; only that
    gradient is clipped. If a gradient is not finite in any pass, the trainer calls `restore` and skips `step`.
    """

    passes: int

    def perturb(self, norm: float) -> None:
        """Moves the weights in `param_groups`, given their unclipped gradients; `norm` is the norm of all gradients.

        A strategy may call this several times in a pass, each time with different weights in `param_groups`.
        """

    def restore(self) -> None:
        """Restores every moved weight to exactly its value before `perturb`; `param_groups` may be empty."""
