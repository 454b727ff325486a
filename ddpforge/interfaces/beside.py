"""Modules that a task uses beside the model: frozen teachers, momentum encoders, reward models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from ddpforge.interfaces.optimizer import Schedule

__all__ = ["Beside"]


@dataclass(frozen=True, kw_only=True)
class Beside:
    """A module that is used beside the model and that no optimizer trains; the strategy places it, sharded or whole.

    It begins with the weights that its constructor gave it, or with those of `weights`: a run, a checkpoint or a
    safetensors file, as for `checkpoint.init_from`, in which nothing may be missing.

    With `follows` it begins as a copy of the model, or of the model's module of that name, which has parameters of the
    same names, shapes and dtypes. After every step its parameters become `momentum * parameter + (1 - momentum) * the
    model's`; `momentum` may be a function of the step, 0 for the first. Its buffers become the model's, unless it is in
    training mode and keeps statistics of its own.

    Checkpoints hold it, unless it comes from `weights`: those are then read again at every start, and others than at
    the beginning of the run are refused. `saved` decides otherwise. One that keeps statistics in training is held.
    """

    module: nn.Module
    weights: str | None = None
    follows: str | None = None  # "" is the model itself
    momentum: float | Schedule = 1.0
    training: bool = False  # in training mode (dropout, statistics of the batch) while the model is; else never
    saved: bool | None = None

    @property
    def is_saved(self) -> bool:
        """True if checkpoints hold its weights."""
        return self.weights is None or self.keeps_statistics if self.saved is None else self.saved

    @property
    def keeps_statistics(self) -> bool:
        """True if forward passes may change what a checkpoint would hold of it, as those of BatchNorm do."""
        return self.training and len(self.module.state_dict()) > len(
            list(self.module.named_parameters(remove_duplicate=False))
        )
