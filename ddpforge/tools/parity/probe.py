"""Callback that `ddpforge parity` adds to its runs: it ends them, and saves the strategy's own initial weights."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ddpforge.interfaces import Callback, RunContext, StepInfo, TensorShard, read_all

__all__ = ["Probe"]


class Probe(Callback):
    """Ends the run after `steps` steps; its state is the weights before a checkpoint was restored."""

    def __init__(
        self,
        *,
        steps: Annotated[int, Field(ge=1, description="Number of steps after which the run ends.")],
        inherit: Annotated[bool, Field(description="Keep the initial weights of the run that this one continues.")],
    ) -> None:
        self.steps, self.inherit = steps, inherit

    def on_start(self, run: RunContext) -> None:
        """Copies the weights, before a checkpoint is restored: they are the strategy's own."""
        self.initial = {name: part.of(part.tensor.clone()) for name, part in run.weights.shards().items()}

    def on_step(self, info: StepInfo) -> bool:
        """True after the last step of the comparison."""
        return info.step >= self.steps  # a shorter `train.length` would change the schedules

    def state(self) -> Mapping[str, TensorShard]:
        """Returns the initial weights."""
        return self.initial

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads the initial weights of the run that this one continues, if `inherit`."""
        if self.inherit:  # both runs begin with weights from a file, which a resumed run does not read
            read_all((state[name], part.region, part.tensor) for name, part in self.initial.items())
