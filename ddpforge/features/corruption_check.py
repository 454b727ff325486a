"""Options of the check for silent corruption, and the recipes that cannot use it; without torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import Callback, Contract, Task

if TYPE_CHECKING:
    from torch import Tensor

    from ddpforge.training.stages import Chosen

__all__ = ["CorruptionCheck", "check_corruption"]


class CorruptionCheck(Callback):
    """Finds silent corruption: bits that a device, memory or a network changed without an error.

    Every `every` steps, at the first step of an attempt, and before each checkpoint, ranks compare hashes of what must
    be equal on all replicas. With `local_gradients`, each rank also computes the newest micro-batch of another rank
    again, and ranks compare the hashes of the gradients.
    """

    def __init__(
        self,
        *,
        every: Annotated[int, Field(ge=1, le=2**31, description="Optimizer steps between two checks.")] = 200,
        local_gradients: Annotated[
            bool,
            Field(description="Also compute one micro-batch per rank again on another rank; only strategy.use = ddp."),
        ] = True,
        action: Annotated[
            Literal["stop", "warn"], Field(description="End the run before the update, or log a warning and go on.")
        ] = "stop",
    ) -> None:
        self.every, self.local_gradients, self.stops = every, local_gradients, action == "stop"
        self.compare: Callable[[], None] = _nothing  # set by the feature of the run

    def on_gradient(self, step: int, norm: Tensor) -> None:
        """Compares the ranks before the weights change."""
        self.compare()


def _nothing() -> None:
    """Compares nothing: the run does not train."""


def check_corruption(chosen: Chosen) -> Iterator[UsageError]:
    """Yields errors for a recipe in which `CorruptionCheck` cannot work."""
    checks = {name: one for name, one in chosen.callbacks.items() if isinstance(one, CorruptionCheck)}
    for number, (name, callback) in enumerate(checks.items()):
        key = f"callbacks.{name}"
        if number:
            yield UsageError(f"{key} is a second check for silent corruption", hints=["remove one"], key=key)
        elif chosen.trains:
            for message, hint in _of_replicas(chosen):
                yield UsageError(f"{key} {message}", hints=[hint], key=key)
            if callback.local_gradients and not chosen.strategy.contract.shards:
                key = f"{key}.local_gradients"
                for message, hint in _of_local_gradients(chosen):
                    yield UsageError(f"{key} {message}", hints=[hint, f"or set {key} = false"], key=key)


def _of_replicas(chosen: Chosen) -> Iterator[tuple[str, str]]:
    contract: Contract = chosen.strategy.contract
    if contract.averages == "weights":
        yield "compares weights, which differ between the ranks of this strategy", 'set strategy.use = "ddp"'
    elif contract.splits_forward:
        yield (
            "does not work with a strategy that divides a forward pass over ranks",
            'set strategy.use = "ddp", or "fsdp" with strategy.replicas = 2 or more',
        )
    elif contract.shards and contract.replicas == 1:
        yield (
            "finds nothing to compare: under this strategy no rank has a copy of another rank's shards",
            'set strategy.replicas = 2 or more with strategy.use = "fsdp", or set strategy.use = "ddp"',
        )
    if chosen.updates:
        yield "does not work with alternating updates", "remove the callback, or use a task with one update"


def _of_local_gradients(chosen: Chosen) -> Iterator[tuple[str, str]]:
    train, task = chosen.recipe.train, chosen.task
    if train.compile != "off" and not train.compile_blocks:
        yield (
            "cannot compute a micro-batch again with the graph that train.compile makes of the whole model",
            "set train.compile_blocks = true",
        )
    for setting in ("sync_batchnorm", "virtual_ranks"):
        if getattr(train, setting):
            yield f"does not work with train.{setting}: a gradient then depends on other passes", f"remove {setting}"
    if task.whole_batch:
        yield "does not work with a loss that compares samples of several ranks", "use another task"
    if type(task).state is not Task.state:
        yield "does not work with a task that has a state: the second pass would change it", "use another task"
