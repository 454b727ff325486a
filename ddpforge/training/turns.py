"""Takes the step of a task: one update, or several, each of which trains its part of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from ddpforge.data import MicroBatch
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Replica, TakesTurns, Total
from ddpforge.recipe.schema import TurnComponent
from ddpforge.training.one_turn import of_turn
from ddpforge.training.step import Stepper
from ddpforge.training.totals import add

__all__ = ["Turns", "draws_of"]

Draws = Iterator[tuple[MicroBatch, Iterable[MicroBatch]]]
"""The global batches of a step: of each the first micro-batch on this rank, and all of them."""


@dataclass(frozen=True)
class Update:
    """One of the updates of a step."""

    turn: str
    draws: bool  # a global batch; else it uses that of the update before
    shared: bool  # whether the update after it uses the same


def updates_of(turns: Mapping[str, TurnComponent]) -> list[Update]:
    """The updates of a step, in their order; without turns there is one."""
    fresh = [(name, turn.fresh) for name, turn in turns.items() for _ in range(turn.repeats)] or [("", True)]
    draws = [True, *(own for _, own in fresh[1:]), True]
    return [Update(name, draws[n], shared=not draws[n + 1]) for n, (name, _) in enumerate(fresh)]


def draws_of(turns: Mapping[str, TurnComponent]) -> int:
    """Counts the global batches that a step takes."""
    return sum(update.draws for update in updates_of(turns))


class Turns:
    """Runs the updates of a step: that of `steppers[""]`, or those of the recipe's `turns`, in the order of the task.

    Each stands for itself: one whose gradient is not finite is left out, and those before and after it are not.
    """

    def __init__(self, replica: Replica, steppers: Mapping[str, Stepper], turns: Mapping[str, TurnComponent]) -> None:
        self._steppers, self.updates = steppers, updates_of(turns)
        self.draws = sum(update.draws for update in self.updates)
        self._replica, self._alone = cast(TakesTurns, replica), steppers.get("")
        if turns and not isinstance(replica, TakesTurns):
            raise StrategyError(
                f"the task makes the updates of {' and '.join(turns)} in each step, and the strategy makes one",
                hints=['set strategy.use = "ddp" or "fsdp"'],
            )

    @property
    def counts(self) -> bool:
        """True if the task counts items that are not samples; known after the first step."""
        return any(stepper.counts for stepper in self._steppers.values())

    def take_empty(self) -> Tensor | float:
        """Returns how many updates had no item on any rank since this was last called."""
        return sum((stepper.take_empty() for stepper in self._steppers.values()), start=0.0)

    def train(self, step: int, draws: Draws, *, measure: bool) -> tuple[dict[str, Total], Tensor]:
        """One step on what `draws` gives; also returns the norm of its gradient (0-d), over all parameters."""
        if self._alone:
            return self._alone.train(step, *next(draws), measure=measure)
        found: dict[str, Total] = {}
        norms: dict[str, list[Tensor]] = {}
        for number, update in enumerate(self.updates):
            if update.draws:
                first, micro_batches = next(draws)
            if update.shared:
                micro_batches = list(micro_batches)
            stepper = self._steppers[update.turn]
            with self._replica.turn(update.turn):
                totals, norm = stepper.train(step, first, micro_batches, measure=measure, update=number)
            add(found, {of_turn(name, update.turn): total for name, total in totals.items()})
            norms.setdefault(update.turn, []).append(norm)
        means = {turn: _root_mean_square(each) for turn, each in norms.items()}
        found |= {of_turn("grad_norm", turn): Total(norm, 1) for turn, norm in means.items()}
        return found, torch.linalg.vector_norm(torch.stack(list(means.values())))


def _root_mean_square(norms: Sequence[Tensor]) -> Tensor:
    """Of the norms of a turn's updates in one step."""
    if len(norms) == 1:
        return norms[0].double()
    return torch.stack(list(norms)).double().square().mean().sqrt()
