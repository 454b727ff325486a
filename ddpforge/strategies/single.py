"""One process, one device, no process group: the reference that every other strategy must equal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddpforge.errors import StrategyError
from ddpforge.interfaces import Contract, World
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

    def setup(self, train: TrainSection) -> World:
        """A world of one."""
        world = super().setup(train)
        if world.size > 1:
            raise StrategyError(
                f'strategy.use = "single" was started in {world.size} processes, which would train the same model '
                f"{world.size} times",
                hints=['set strategy.use = "ddp", or start one process: `ddpforge run RECIPE`'],
            )
        return world
