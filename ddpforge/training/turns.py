"""Steps of several updates: a task as each of its turns sees it, and the updates in their order."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import getsourcefile
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from ddpforge.components.local_code import PREFIX
from ddpforge.errors import PluginError, StrategyError
from ddpforge.interfaces import Metric, Replica, TakesTurns, Task, Total
from ddpforge.recipe.schema import TurnComponent

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ddpforge.data import MicroBatch

__all__ = [
    "OneTurn",
    "Turns",
    "draws_of",
    "finished",
    "name_of",
    "of_turn",
    "of_turns",
    "reports_of",
    "step_function",
    "takes_turn",
    "turns_of",
    "updates_of",
    "with_sum",
]


# ---------------------------------------------------------------------------------------------- the task
def turns_of(task: Task) -> tuple[str, ...]:
    """The turns that a task declares; raises PluginError for what are no names."""
    turns: Any = task.turns
    if isinstance(turns, str) or not all(isinstance(turn, str) and re.fullmatch(r"[\w-]+", turn) for turn in turns):
        raise PluginError(
            f"{type(task).__name__}.turns is {turns!r}, and must be names of letters, digits, `_` and `-`",
            hints=['e.g. turns = ("discriminator", "generator")'],
        )
    return tuple(turns)


def takes_turn(task: Task) -> bool:
    """True if the loss of a task can be told the turn that it computes."""
    try:
        inspect.signature(task.loss).bind(None, None, "")
    except TypeError:
        return False
    return True


def of_turns(task: Task) -> dict[str, Task]:
    """The task as each of its turns sees it, by the turn; one without turns is itself, as ""."""
    return {turn: cast(Task, OneTurn(task, turn)) for turn in turns_of(task)} or {"": task}


class OneTurn:
    """A task whose loss is that of one turn; everything else is that of `task`."""

    def __init__(self, task: Task, turn: str) -> None:
        self.task, self.turn = task, turn

    def __getattr__(self, name: str) -> Any:
        if name in ("task", "turn"):  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self.task, name)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """The loss of the turn, and its outputs."""
        told: Any = self.task.loss
        pair: tuple[Tensor, Any] = told(model, batch, self.turn)
        return pair

    def finish(self, metrics: dict[str, float]) -> dict[str, float]:
        """Returns what the task makes of the turn's metrics, which have its name behind them."""
        return self.task.finish({of_turn(name, self.turn): value for name, value in metrics.items()})


def name_of(part: object) -> str:
    """A component as people know it: its class, and the file of code that is not installed."""
    kind = type(part.task if isinstance(part, OneTurn) else part)
    if not kind.__module__.startswith(PREFIX):
        return kind.__qualname__
    return f"{os.path.basename(getsourcefile(kind) or '')}:{kind.__qualname__}"


def reports_of(task: Task) -> Mapping[str, Metric]:
    """A task's metrics by the names of what all of its turns report."""
    turns = turns_of(task)
    return {of_turn(name, turn): metric for turn in turns for name, metric in task.reports.items()} or task.reports


def finished(task: Task, means: Mapping[str, float]) -> dict[str, float]:
    """Makes what is reported of averaged metrics."""
    return task.finish(with_sum(task, means))


def with_sum(task: Task, means: Mapping[str, float]) -> dict[str, float]:
    """Adds, where there are turns, their losses up to `loss`."""
    losses = [means[name] for turn in task.turns if (name := of_turn("loss", turn)) in means]
    return {"loss": sum(losses), **means} if losses else dict(means)


def of_turn(name: str, turn: str) -> str:
    """The name of what is reported of a turn."""
    return f"{name}/{turn}" if turn else name


# ---------------------------------------------------------------------------------------------- the updates
StepFunction: TypeAlias = "Callable[..., tuple[dict[str, Total], Tensor]]"
"""Takes an update on micro-batches, as `Stepper.train_step` does; returns totals and the gradient's norm."""

Draws: TypeAlias = "Iterator[tuple[MicroBatch, Iterable[MicroBatch]]]"
"""The global batches of a step: of each the first micro-batch on this rank, and all of them."""


@dataclass(frozen=True)
class Update:
    """One of the updates of a step."""

    turn: str
    draws: bool  # a global batch; else it uses that of the update before
    shared: bool  # whether the update after it uses the same


def updates_of(turns: Mapping[str, TurnComponent]) -> list[Update]:
    """The updates of a step, in their order; without turns there is one."""
    fresh = [(name, turn.new_batch) for name, turn in turns.items() for _ in range(turn.n_updates)] or [("", True)]
    draws = [True, *(own for _, own in fresh[1:]), True]
    return [Update(name, draws[n], shared=not draws[n + 1]) for n, (name, _) in enumerate(fresh)]


def draws_of(turns: Mapping[str, TurnComponent]) -> int:
    """Counts the global batches that a step takes."""
    return sum(update.draws for update in updates_of(turns))


def step_function(
    replica: Replica, steps: Mapping[str, StepFunction], turns: Mapping[str, TurnComponent]
) -> Callable[..., tuple[dict[str, Total], Tensor]]:
    """Returns the function that takes a step on `draws`: of one update, or of all `turns`."""
    if turns:
        return Turns(replica, steps, turns).train_step
    only = steps[""]
    return lambda step, draws, *, measure: only(step, *next(draws), measure=measure)


class Turns:
    """Takes steps of several updates: those of the recipe's `turns`, in the order of the task, each by its function.

    Each stands for itself: one whose gradient is not finite is left out, and those before and after it are not.
    """

    def __init__(self, replica: Replica, steps: Mapping[str, StepFunction], turns: Mapping[str, TurnComponent]) -> None:
        self._steps, self.updates = steps, updates_of(turns)
        self._replica = cast(TakesTurns, replica)
        if not isinstance(replica, TakesTurns):
            raise StrategyError(
                f"the task makes the updates of {' and '.join(turns)} in each step, and the strategy makes one",
                hints=['set strategy.use = "ddp" or "fsdp"'],
            )

    def train_step(self, step: int, draws: Draws, *, measure: bool) -> tuple[dict[str, Total], Tensor]:
        """Takes one step on the global batches of `draws`; the norm (0-d) is that over all parameters."""
        import torch

        from ddpforge.training.totals import add

        found: dict[str, Total] = {}
        norms: dict[str, list[Tensor]] = {}
        for number, update in enumerate(self.updates):
            if update.draws:
                first, micro_batches = next(draws)
            if update.shared:
                micro_batches = list(micro_batches)
            train_step = self._steps[update.turn]
            with self._replica.turn(update.turn):
                totals, norm = train_step(step, first, micro_batches, measure=measure, update=number)
            add(found, {of_turn(name, update.turn): total for name, total in totals.items()})
            norms.setdefault(update.turn, []).append(norm)
        means = {turn: _root_mean_square(each) for turn, each in norms.items()}
        found |= {of_turn("grad_norm", turn): Total(norm, 1) for turn, norm in means.items()}
        return found, torch.linalg.vector_norm(torch.stack(list(means.values())))


def _root_mean_square(norms: Sequence[Tensor]) -> Tensor:
    """Of the norms of a turn's updates in one step."""
    if len(norms) == 1:
        return norms[0].double()
    import torch

    return torch.stack(list(norms)).double().square().mean().sqrt()
