"""A task with several updates a step, as each of its turns sees it, and what is reported of all of them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from ddpforge.errors import PluginError
from ddpforge.interfaces import Metric, Task

__all__ = ["OneTurn", "finished", "of_turn", "of_turns", "reports_of", "takes_turn", "turns_of", "with_sum"]


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
