"""The callback that `ddpforge parity` adds to its runs: it ends them, and keeps the weights they would begin with."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from ddpforge.interfaces import Callback, StepInfo, Weights, World

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Probe"]


class Probe(Callback):
    """Ends the run after so many steps, and writes the weights before anything is restored to a file."""

    def __init__(
        self,
        *,
        steps: Annotated[int, Field(ge=1, description="After how many steps to end.")],
        initial: Annotated[Path, Field(description="The safetensors file for the initial weights.")],
    ) -> None:
        self.steps, self.initial = steps, initial

    def on_start(self, model: "nn.Module", world: World, weights: Weights) -> None:
        """Called before a checkpoint is restored: these weights are the strategy's own."""
        from ddpforge.checkpoint.tensors import encode

        whole = weights.gather(weights.parts())
        if world.is_main:
            with self.initial.open("wb") as file:
                file.writelines(encode(whole, {}))

    def on_step(self, info: StepInfo) -> bool:
        """The end is not moved with `train.length`, because schedules depend on that."""
        return info.step >= self.steps
