"""The experts of a layer, for models whose experts can be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Experts"]


class Experts:
    """All experts of a layer, on this rank.

    A model declares that its experts may be spread over ranks by an `experts = Experts()` of the module that has their
    weights, and by asking it. All parameters of that module have an expert for each row. A strategy that spreads them
    puts another in its place, and leaves this rank some of the rows.
    """

    def compute(self, slots: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Has experts `compute` on `slots` [experts, n, width]; it may be given fewer experts, and more slots."""
        return compute(slots)
