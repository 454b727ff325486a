"""Experts of a layer, for models with experts that can be distributed over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ExpertDispatch"]


class ExpertDispatch:
    """All experts of a layer, on this rank.

    A model supports expert parallelism if the module with the experts' weights has an `experts = ExpertDispatch()` and
    calls `compute` on it. Row i of every parameter of that module belongs to expert i. A strategy that distributes
    experts replaces this object by its own, and keeps only some of the rows on each rank.
    """

    def compute(self, slots: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns `compute(slots)` for `slots` [experts, n, width].

        A strategy may call `compute` with fewer experts and more slots per expert.
        """
        return compute(slots)
