"""Agreement of the ranks beside metrics: who wants to stop, whose clock has rung, how fast steps are, what is saved."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ddpforge.interfaces import Total

__all__ = ["Agreement", "Ballot"]


@dataclass(frozen=True)
class Agreement:
    """The outcome of a ballot, the same on every rank."""

    wanted: frozenset[str] = frozenset()  # wishes that any rank has
    seconds: float = 0.0  # that a step takes, on average over ranks
    all_saved: bool = False  # whether every rank has written its part of a checkpoint


class Ballot:
    """Lets ranks agree in a reduction that they make anyway: a ballot's totals ride with those of the metrics.

    `wishes` are the names of all that a rank may want.
    """

    def __init__(self, wishes: Sequence[str]) -> None:
        self._wishes = wishes

    def totals(self, wanted: Collection[str], *, seconds: float, saved: bool) -> dict[str, Total]:
        """This rank's ballot."""
        said = {f"?{name}": float(name in wanted) for name in self._wishes}
        said |= {"?seconds": seconds, "?saved": float(saved)}
        return {name: Total(torch.tensor(value, dtype=torch.float64), 1) for name, value in said.items()}

    def count(self, means: dict[str, float]) -> Agreement:
        """Takes the means of all ranks' ballots out of `means`."""
        wanted = frozenset(name for name in self._wishes if means.pop(f"?{name}") > 0)
        return Agreement(wanted, means.pop("?seconds"), means.pop("?saved") == 1.0)
