"""Totals of all ranks become means: in one all-reduce, whatever each rank names and in which order."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ddpforge.interfaces import Ranks, Total

__all__ = ["Means"]


class Means:
    """Divides sums by counts, both over all ranks; what is reduced is laid out by names that ranks agreed on.

    Ranks may name different quantities, or the same ones in another order: a metric of a class that only some batches
    hold, say. A rank fills in nothing for a name that it lacks. One more number says whether a rank has a name that
    is not agreed on yet; if so, all ranks learn of each other's names and reduce again, once for each new name.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._names: list[str] = []

    def __call__(self, totals: Mapping[str, Total]) -> dict[str, float]:
        """The mean of everything that any rank named; NaN where nothing was counted. Collective."""
        news, *numbers = self._reduce(totals)
        if news:
            self._names = sorted({*self._names, *(name for names in self._ranks.everyone([*totals]) for name in names)})
            _, *numbers = self._reduce(totals)

        columns = zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        found = dict(zip(self._names, columns, strict=True))
        named = [name for name in dict.fromkeys([*totals, *self._names]) if found[name][2]]
        return {name: found[name][0] / found[name][1] if found[name][1] else math.nan for name in named}

    def _reduce(self, totals: Mapping[str, Total]) -> list[float]:
        values = [torch.as_tensor(x, dtype=torch.float64) for x in self._row(totals)]
        device = next((x.device for x in values if x.device.type != "cpu"), values[0].device)
        summed: list[float] = self._ranks.sum(torch.stack([x.to(device) for x in values]).detach()).tolist()
        return summed

    def _row(self, totals: Mapping[str, Total]) -> Iterator[Tensor | float]:
        """Yields 1 if there is news, and of each agreed name its sum, its count, and 1 if this rank has it."""
        yield float(not totals.keys() <= set(self._names))
        for name in self._names:
            total = totals.get(name)
            yield from (total.sum, total.count, 1.0) if total else (0.0, 0.0, 0.0)
