"""Test helpers: trains a model step by step under a strategy of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ddpforge.interfaces import CanonicalState, Strategy, World
from ddpforge.interfaces.regions import FlatRange, Region, copy
from ddpforge.recipe.schema import TrainSection
from ddpforge.strategies import SingleRank
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

ALONE = World(global_ranks=SingleRank(), dp_ranks=SingleRank(), device=torch.device("cpu"), local_rank=0)


def train(**options: Any) -> TrainSection:
    """Returns the [train] table of a recipe on a CPU."""
    return TrainSection.model_validate({"length": "1st", "global_batch": 4, "device": "cpu"} | options)


def refused(kind: type[Exception], action: Callable[[], object]) -> str:
    """Returns the message and hints of the error of type `kind` that `action` must raise."""
    with pytest.raises(kind) as found:
        action()
    return " | ".join([found.value.message, *found.value.hints])  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Saved:
    """Whole tensor, as read from a checkpoint."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor.clone()

    def read_into(self, region: Region, target: Tensor) -> None:
        flat = target.view(-1) if isinstance(region, FlatRange) else target
        copy(self.shape, FlatRange(0, self.tensor.numel()), self.tensor.reshape(-1), region, flat)


def saved(state: CanonicalState[Any]) -> CanonicalState[Any]:
    """Returns a state of whole tensors, as read from a checkpoint."""

    def read(value: Any) -> Any:
        return Saved(value.clone()) if isinstance(value, Tensor) and value.ndim else value

    return CanonicalState(
        {name: Saved(value.clone()) for name, value in state.model.items()},
        {name: {key: read(value) for key, value in entry.items()} for name, entry in state.optimizer.items()},
        dict(state.aliases),
        {name: read(value) for name, value in state.extra_state.items()},
        dict(state.scalars),
    )


class Training:
    """Trains a model; the loss is the sum of its outputs."""

    def __init__(
        self,
        strategy: Strategy,
        build: Callable[[], nn.Module],
        optimizer: Callable[[Any], Optimizer] = lambda weights: SGD(weights, lr=1.0),
        blocks: Callable[[Any], Sequence[nn.Module]] = lambda model: (),
        **options: Any,
    ) -> None:
        self.strategy, settings = strategy, train(**options)
        assert list(strategy.unsupported(settings, 1, "cpu")) == []
        self.world = strategy.setup(settings, ALONE)
        with strategy.init_context():
            model = build()
        model = strategy.wrap(model, blocks(model))
        self.replica: Any = strategy.prepare(model, optimizer(model.parameters()))

    def step(self, *inputs: Tensor) -> float:
        """Trains one step, with one micro-batch per input; returns the norm of the gradient."""
        for number, x in enumerate(inputs, 1):
            with self.replica.forward(last=number == len(inputs)):
                loss = self.replica.module(x).sum()
            self.replica.backward(loss)
        return float(self.replica.step().item())

    def state(self) -> Any:
        return self.replica.state()
