"""Strategies with one error each, for `ddpforge parity` to find; recipes name this file like parts.py."""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, Replica, Tracker, World
from ddpforge.strategies.ddp import DDP

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection


class ForgetsToAverage(DDP):
    """Never marks the last micro-batch of a step, in which gradients are averaged."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        replica = super().prepare(model, optimizer)
        forward = replica.forward
        replica.forward = lambda *, last=True: forward(last=False)  # type: ignore[method-assign]
        return replica


class Slips(DDP):
    """Multiplies the gradients of one step by 1.1."""

    def __init__(self, *, at: int = 3) -> None:
        super().__init__()
        self.until = at

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        replica = super().prepare(model, optimizer)
        update = replica.step

        def step() -> Tensor:
            self.until -= 1
            if self.until == 0:
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter.grad *= 1.1
            return update()

        replica.step = step  # type: ignore[method-assign]
        return replica


class BeginsElsewhere(DDP):
    """Draws other initial weights than all other strategies."""

    def init_context(self) -> AbstractContextManager[Any]:
        torch.manual_seed(7)
        return super().init_context()


class SavesRounded(DDP):
    """Trains correctly, but saves rounded weights."""

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        replica = super().prepare(model, optimizer)
        whole = replica.state

        def state() -> CanonicalState[Any]:
            state = whole()
            held = {name: weight for name, weight in state.model.items() if isinstance(weight, Tensor)}
            return replace(state, model={name: weight.bfloat16().float() for name, weight in held.items()})

        replica.state = state  # type: ignore[method-assign]
        return replica


class GivesUp(DDP):
    """Cannot work here."""

    def setup(self, train: "TrainSection", world: World) -> World:
        raise StrategyError("this machine has no flux capacitor", hints=["order one"])


class Loud(Tracker):
    """Creates a file, which shows that it was built."""

    def __init__(self, *, file: Path) -> None:
        file.touch()
