"""One process, one device, no process group. Every other strategy must reproduce its results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ddpforge.interfaces import Contract, Replica, Strategy, Unsupported

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ddpforge.recipe.schema import TrainSection

__all__ = ["Single"]


class Single(Strategy):
    """Strategy for one process; it refuses to start in several."""

    contract = Contract(
        clipping="before the update, by the norm of all gradients",
        accumulation="autograd, in the parameters' .grad",
        reads_gradients=True,
        optimizers="several",
        float8=True,
    )

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Refuses more than one process."""
        if ranks > 1:
            yield Unsupported(
                "strategy.use",
                f'strategy.use = "single" was started in {ranks} processes, which would train the same model '
                f"{ranks} times",
                ('set strategy.use = "ddp", or start one process: `ddpforge run RECIPE`',),
            )

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Returns a replica with the model as it is."""
        from ddpforge.strategies.torch_replica import WholeReplica

        return WholeReplica(self, model, optimizer, may_be_unused=True)
