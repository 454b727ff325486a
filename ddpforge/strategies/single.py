"""One process, one device, no process group: the reference that every other strategy must equal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpforge.interfaces import Contract, Refusal
from ddpforge.strategies.accelerated import AcceleratedStrategy

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["Single"]


class Single(AcceleratedStrategy):
    """Trains in one process; refuses to start in more."""

    contract = Contract(
        clips="before the update, by the norm of all gradients",
        accumulates="autograd, in the parameters' .grad",
    )

    def refusals(self, train: TrainSection, ranks: int, device: str) -> Iterator[Refusal]:
        """More than one process."""
        yield from super().refusals(train, ranks, device)
        if ranks > 1:
            yield Refusal(
                "strategy.use",
                f'strategy.use = "single" was started in {ranks} processes, which would train the same model '
                f"{ranks} times",
                ('set strategy.use = "ddp", or start one process: `ddpforge run RECIPE`',),
            )
