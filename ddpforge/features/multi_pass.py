"""Multi-pass optimizers, which need gradients at several places in a step, as SAM does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from ddpforge.errors import StrategyError
from ddpforge.interfaces import MultiPassOptimizer, Replica, SupportsMultiPass
from ddpforge.training.buffers import unchanged
from ddpforge.training.features import Assembled, Feature

__all__ = ["MultiPass", "MultiPassUpdate"]


class MultiPass(Feature):
    """Updates by multi-pass optimizers; other optimizers are not concerned."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature for a run that trains."""
        return cls(run.replica) if run.trains else None

    @override
    def start(self, stateful: nn.Module) -> None:
        self._stateful = stateful

    @override
    def around_update(self, optimizer: Optimizer) -> Callable[[Callable[[], Any]], Tensor] | None:
        if getattr(optimizer, "passes", 1) == 1:
            return None
        return MultiPassUpdate(self._replica, cast(MultiPassOptimizer, optimizer), self._stateful)


class MultiPassUpdate:
    """Update by a multi-pass optimizer (SAM), which needs gradients at several places; see `MultiPassOptimizer`."""

    def __init__(self, replica: Replica, optimizer: MultiPassOptimizer, stateful: nn.Module) -> None:
        self._replica, self._optimizer, self._stateful = replica, optimizer, stateful
        if not isinstance(replica, SupportsMultiPass):
            raise StrategyError(
                f"{type(optimizer).__name__} makes {optimizer.passes} passes per step, but the strategy supports only "
                "optimizers that make one",
                hints=["use another optimizer or another strategy"],
            )

    def __call__(self, again: Callable[[], Any]) -> Tensor:
        """Runs the passes after the first one, and updates the weights; returns the last norm."""
        explores, optimizer = cast(SupportsMultiPass, self._replica), self._optimizer
        for _ in range(1, optimizer.passes):
            norm = explores.perturb(optimizer)
            if not math.isfinite(norm.item()):
                optimizer.restore()
                break
            with unchanged(self._stateful):
                again()
        else:
            optimizer.restore()
            norm = self._replica.step()
        if not math.isfinite(norm.item()):  # no update was made: only `changed` makes forward passes use the weights
            self._replica.weights.mark_changed()
        return norm
