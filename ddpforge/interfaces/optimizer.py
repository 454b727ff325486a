"""Schedules of the learning rate, and optimizers that look at a gradient more than once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

__all__ = ["Exploring", "Schedule"]

Schedule = Callable[[int], float]
"""Maps a step (0 for the first) to the factor on the recipe's learning rate. A pure function: nothing to save."""


@runtime_checkable
class Exploring(Protocol):
    """An optimizer that looks at a step's gradient more than once, at different weights; optional.

    It is a `torch.optim.Optimizer` whose `passes`, read once, is more than 1. In each pass the trainer computes the
    gradient of the whole step, with the same micro-batches and the same random numbers. After every pass but the last
    it calls `explore` where else it would call `step`; then `restore`, and `step` with the last gradient. What is
    logged of the loss is that of the first pass, and so are buffers; the norm is that of the last gradient, which alone
    is clipped. A gradient that is not finite, in any pass, ends the step: there is a `restore` and no `step`.
    """

    passes: int

    def explore(self, norm: float) -> None:
        """Moves the weights in `param_groups`, each of which has its gradient; `norm` is that of all gradients.

        Gradients are not clipped. A strategy may call this several times in a pass, each time with other weights in
        `param_groups`.
        """

    def restore(self) -> None:
        """Gives every weight that was moved exactly the value it had before; `param_groups` may be empty."""
