"""Callbacks that `ddpforge parity` adds to its runs: they end them, and save initial weights and first gradients."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from ddpforge.api import perturb
from ddpforge.interfaces import Callback, RunContext, StepInfo, TensorShard, read_all

__all__ = ["GRADIENT", "Probe", "probe"]

GRADIENT = "gradient of "  # begins the names of gradients in the state


def probe(
    *,
    steps: Annotated[int, Field(ge=1, description="Number of steps after which the run ends.")],
    inherit: Annotated[bool, Field(description="Keep the initial weights of the run that this one continues.")],
    gradients: Annotated[bool, Field(description="Save the gradients of the first step.")] = False,
    perturbed: Annotated[int, Field(ge=0, description="Seed for a perturbation of the restored weights.")] = 0,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        Field(description="Dtype whose last place is perturbed; by default that of each weight."),
    ] = None,
) -> Callback:
    """Returns the callback of a compared run."""
    kind = GradientProbe if gradients else Probe
    return kind(steps, inherit, perturbed, getattr(torch, dtype) if dtype else None)


class Probe(Callback):
    """Ends the run after `steps` steps; its state is the weights before a checkpoint was restored.

    Restored weights change by one unit in the last place if `perturbed` is not 0; it is then the seed.
    """

    def __init__(self, steps: int, inherit: bool, perturbed: int, dtype: torch.dtype | None) -> None:
        self.steps, self.inherit, self.perturbed, self.dtype = steps, inherit, perturbed, dtype

    def on_start(self, run: RunContext) -> None:
        """Copies the weights, before a checkpoint is restored: they are the strategy's own."""
        self.run, self.gradients = run, dict[str, TensorShard]()
        self.initial = self._copied()

    def on_step(self, info: StepInfo) -> bool:
        """True after the last step of the comparison."""
        return info.step >= self.steps  # a shorter `train.length` would change the schedules

    def state(self) -> Mapping[str, TensorShard]:
        """Returns the initial weights, and the gradients of the first step if this callback reads them."""
        return {**self.initial, **{GRADIENT + name: one for name, one in self.gradients.items()}}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Loads the initial weights of the run that this one continues, if `inherit`; perturbs restored weights."""
        if self.inherit:  # both runs begin with weights from a file, which a resumed run does not read
            read_all((state[name], part.region, part.tensor) for name, part in self.initial.items())
        if self.perturbed:
            held = self.run.weights.shards().items()
            # The region is a part of the name: ranks with equal elements change them in equal ways.
            perturb({f"{name} {part.region}": part.tensor for name, part in held}, self.dtype, seed=self.perturbed)
            self.run.weights.mark_changed()
            self.initial = self._copied()

    def _copied(self) -> dict[str, TensorShard]:
        return {name: part.of(part.tensor.clone()) for name, part in self.run.weights.shards().items()}


class GradientProbe(Probe):
    """Also saves the gradients of the first step, under strategies whose gradients callbacks can read."""

    def on_gradient(self, step: int, norm: Tensor) -> None:
        """Copies the gradients of the first step."""
        if step == 1:
            self.gradients |= {name: part.of(part.tensor.clone()) for name, part in self.run.gradients().items()}
