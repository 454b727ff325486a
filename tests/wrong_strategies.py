"""Strategies that each get one thing wrong, for `ddpforge parity` to find; recipes name this file like parts.py."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, Tracker, World
from ddpforge.strategies.ddp import DDP

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection


class ForgetsToAverage(DDP):
    """Never comes to the last micro-batch of a step, in which gradients are averaged."""

    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        return super().micro_step(model, last=False)


class Slips(DDP):
    """Has gradients a tenth too large in one step."""

    def __init__(self, *, at: int = 3) -> None:
        super().__init__()
        self.until = at

    def step(self, model: nn.Module, optimizer: Optimizer) -> Tensor:
        self.until -= 1
        if self.until == 0:
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad *= 1.1
        return super().step(model, optimizer)


class BeginsElsewhere(DDP):
    """Draws other initial weights than everybody else."""

    def building(self) -> AbstractContextManager[Any]:
        torch.manual_seed(7)
        return super().building()


class SavesRounded(DDP):
    """Trains well and saves something else."""

    def state(self, model: nn.Module, optimizer: Optimizer) -> CanonicalState:
        state = super().state(model, optimizer)
        return replace(state, model={name: weight.bfloat16().float() for name, weight in state.model.items()})


class GivesUp(DDP):
    """Cannot work here."""

    def setup(self, train: "TrainSection") -> World:
        raise StrategyError("this machine has no flux capacitor", hints=["order one"])


class Loud(Tracker):
    """Leaves a file that says it was there."""

    def __init__(self, *, file: Path) -> None:
        file.touch()
