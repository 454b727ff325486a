"""The callback that `ddpforge parity` adds to its runs: it ends them, and keeps the weights they would begin with."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from ddpforge.interfaces import Callback, Part, RunContext, StepInfo, read_all

__all__ = ["Probe"]


class Probe(Callback):
    """Ends the run after so many steps; its state is the weights from before anything was restored."""

    def __init__(
        self,
        *,
        steps: Annotated[int, Field(ge=1, description="After how many steps to end.")],
        inherit: Annotated[bool, Field(description="Keep the initial weights of the run that this one continues.")],
    ) -> None:
        self.steps, self.inherit = steps, inherit

    def on_start(self, run: RunContext) -> None:
        """Called before a checkpoint is restored: these weights are the strategy's own."""
        self.initial = {name: part.of(part.tensor.clone()) for name, part in run.weights.parts().items()}

    def on_step(self, info: StepInfo) -> bool:
        """The end is not moved with `train.length`, because schedules depend on that."""
        return info.step >= self.steps

    def state(self) -> Mapping[str, Part]:
        """The initial weights."""
        return self.initial

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Those of another run count only where both begin with weights from a file, which this one has not read."""
        if self.inherit:
            read_all((state[name], part.region, part.tensor) for name, part in self.initial.items())
