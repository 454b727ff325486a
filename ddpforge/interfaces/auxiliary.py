"""Auxiliary modules that a task uses in addition to the model: frozen teachers, momentum encoders, reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from ddpforge.interfaces.optimizer import Schedule

__all__ = ["AuxiliaryModule"]


@dataclass(frozen=True, kw_only=True)
class AuxiliaryModule:
    """Auxiliary module of a task. No optimizer trains it; the strategy places it, sharded or whole.

    Its initial weights are those of its constructor. `weights` replaces them by the weights of a run, a checkpoint or
    a safetensors file, as `checkpoint.init_from` does; the source must contain every tensor.

    `follows` makes it an exponential moving average: it starts as a copy of the model ("") or of the model's submodule
    of that name, which must have parameters of the same names, shapes and dtypes. After every step each parameter
    becomes `momentum * parameter + (1 - momentum) * the model's`. `momentum` may be a function of the step, which
    starts at 0. Buffers are copied from the model, unless this module is in training mode and keeps statistics itself.

    Checkpoints contain the module if it has no `weights`, or if it keeps statistics in training. Otherwise `weights` is
    read again at every start, and weights that differ from those at the beginning of the run are refused. `saved`
    overrides this choice.
    """

    module: nn.Module
    weights: str | None = None
    follows: str | None = None  # "" is the model itself
    momentum: float | Schedule = 1.0
    training: bool = False  # True: in training mode (dropout, batch statistics) while the model is
    saved: bool | None = None

    @property
    def is_saved(self) -> bool:
        """True if checkpoints contain its weights."""
        return self.weights is None or self.updates_buffers if self.saved is None else self.saved

    @property
    def updates_buffers(self) -> bool:
        """True if forward passes may change its saved buffers, as BatchNorm does."""
        return self.training and len(self.module.state_dict()) > len(
            list(self.module.named_parameters(remove_duplicate=False))
        )
