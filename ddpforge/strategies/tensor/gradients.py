"""Gradients where ranks share layers: which are of a share, which add up, and whether the others are alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from ddpforge.errors import StrategyError
from ddpforge.ranks.collectives import Connected

__all__ = ["ShareGradients"]

_TOLERANCE = 1e-3  # relative; sums in another order differ by less, and a share of a sum by more


class ShareGradients:
    """Takes this rank's gradients by parameter name, as plain tensors.

    Those of `cut` parameters are of a share; those of `summed` ones add up to the whole, over `ranks`; all others are
    the whole on every rank.
    """

    def __init__(self, ranks: Connected, *, cut: Collection[str], summed: Collection[str]) -> None:
        self._ranks, self._cut, self._summed = ranks, cut, summed
        self._compared: set[str] = set()

    @torch.no_grad()
    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Adds up what adds up, in place; at the first of each, raises StrategyError where the plan forgot it."""
        if mine := [gradient for name, gradient in gradients.items() if name in self._summed]:
            total = self._ranks.sum(torch.cat([gradient.flatten() for gradient in mine]))
            for gradient, summed in zip(mine, torch.split(total, [g.numel() for g in mine]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        new = {name: gradient for name, gradient in gradients.items() if name not in self._compared}
        if new:  # in the first step, or the first turn that trains them
            self._compared |= new.keys()
            self._refuse_unlike({name: gradient for name, gradient in new.items() if name not in self._cut})

    def square(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The square of the norm of this rank's gradients over ranks; what all have alike counts once."""
        shares = [gradient for name, gradient in gradients.items() if name in self._cut]
        others = [gradient for name, gradient in gradients.items() if name not in self._cut]
        mine = _square(shares) + _square(others) / self._ranks.size
        return self._ranks.sum(mine)

    def _refuse_unlike(self, gradients: Mapping[str, Tensor]) -> None:
        if not gradients:
            return
        norms = torch.stack([gradient.double().norm() for gradient in gradients.values()])
        sums = torch.stack([gradient.double().sum() for gradient in gradients.values()])
        of_ranks = self._ranks.collect(torch.stack([norms, sums])[None])
        spread = (of_ranks.amax(0) - of_ranks.amin(0)).tolist()
        sizes = [gradient.numel() ** 0.5 for gradient in gradients.values()]
        for name, size, norm, *differences in zip(gradients, sizes, norms.tolist(), *spread, strict=True):
            if any(found > _TOLERANCE * norm * times for found, times in zip(differences, (1.0, size), strict=True)):
                raise StrategyError(
                    f"parameter `{name}` is whole on every rank, and those that share layers have other gradients of "
                    "it: each saw a share of what it is used for",
                    hints=[
                        'give its module the style "summed" in the plan, or, if the sequence is cut there, "sequence"',
                        'look for "columns" in the plan that no "rows" follow, or the other way round',
                    ],
                )


def _square(gradients: list[Tensor]) -> Tensor:
    return torch.nn.utils.get_total_norm(gradients).square()
