"""Training on forked ranks with the check for silent corruption, and single flipped bits in it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW

from ddpforge.data import MicroBatch
from ddpforge.features.corruption_check import CorruptionCheck
from ddpforge.features.silent_corruption import LOCAL, OPTIMIZER, REDUCED, WEIGHTS, SilentCorruption
from ddpforge.interfaces import Strategy, Task
from ddpforge.strategies.ddp import DDP
from ddpforge.training.step import Stepper
from support.forked import Training

PLACES = (LOCAL, REDUCED, WEIGHTS, OPTIMIZER)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class CrossEntropy(Task):
    """Task with the summed cross-entropy of classes."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        outputs = model(inputs)
        return functional.cross_entropy(outputs.float().flatten(0, -2), labels.flatten(), reduction="sum"), outputs


def network() -> nn.Module:
    """Returns a network with BatchNorm and dropout."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def features(draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Returns a micro-batch of `network`."""
    return torch.randn(6, 8, generator=draw), torch.randint(0, 4, (6,), generator=draw)


@dataclass(frozen=True)
class Flip:
    """Flip of one bit on one rank: the kind of the tensor, its parameter, the element and the bit."""

    place: str
    rank: int
    name: str
    element: int
    bit: int

    def __call__(self, tensor: Tensor) -> None:
        values = tensor.detach().view(-1)
        bits = values.view(_INTEGERS[values.element_size()])
        one = self.bit % (8 * bits.element_size())
        bits[self.element % len(bits)] ^= -(1 << one) if one == 8 * bits.element_size() - 1 else 1 << one


def drawn(draw: random.Random, place: str, ranks: int, parameters: Sequence[str]) -> Flip:
    """Returns a random flip in `place`."""
    name = draw.choice(parameters)
    return Flip(place, draw.randrange(ranks), name, draw.randrange(1 << 20), draw.randrange(32))


class Checked:
    """Training with AdamW on this rank, step by step, with the check at every `every`th step."""

    def __init__(
        self,
        strategy: Strategy | None = None,
        *,
        build: Callable[[], nn.Module] = network,
        batch: Callable[[torch.Generator], Any] = features,
        blocks: Callable[[Any], Sequence[nn.Module]] = lambda model: (),
        task: Task | None = None,
        micro_batches: int = 1,
        samples: Callable[[int], int] | None = None,
        checks: bool = True,
        precision: str = "fp32",
        **options: Any,
    ) -> None:
        training = Training(strategy or DDP(), build, lambda ones: AdamW(ones, lr=1e-3), blocks, precision=precision)
        self.replica, self.world, self.task = training.replica, training.world, task or CrossEntropy()
        self.rank = self.world.global_ranks.rank
        self.batch, self.micro_batches, self.samples = batch, micro_batches, samples
        self.options = CorruptionCheck(**{"every": 1} | options)
        found = []
        if checks:
            key = "callbacks.corruption_check"
            self.feature = SilentCorruption(self.world, self.replica, self.task, self.options, key)
            self.feature.start(self.replica.unwrapped)
            found = [self.feature]
        self.stepper = Stepper(self.world, self.replica, self.task, features=found, seed=0)
        self.number = 0
        self.parameters = [name for name, _ in self.replica.unwrapped.named_parameters()]

    def step(self, flip: Flip | None = None) -> None:
        """Takes a step, with a flip if it is on this rank."""
        mine = flip if flip and flip.rank == self.rank else None
        self.number += 1
        self.task.step_of_run = self.number
        self.replica.module.train()
        self.replica.on_gradient = partial(self._on_gradient, mine)
        hook = self._before(mine) if mine else None
        draw = torch.Generator().manual_seed(1000 * self.number + self.rank)
        count, ranks = self.micro_batches, self.world.dp_ranks.size
        micros = []
        for number in range(count):
            data = self.batch(draw)
            size = self.samples(self.rank) if self.samples else len(data[0])
            micros.append(MicroBatch(data, size, 6 * count * ranks, number == count - 1, self.rank, number))
        try:
            self.stepper.train_step(self.number, micros[0], micros, measure=False)
        finally:
            if hook:
                hook.remove()

    def _before(self, flip: Flip) -> Any:
        if flip.place == WEIGHTS:
            flip(self.replica.weights.shards()[flip.name].tensor)
        elif flip.place == OPTIMIZER:
            held = self.replica.state().optimizer[flip.name]["exp_avg"]
            flip(held if isinstance(held, Tensor) else held.tensor)
        elif flip.place == LOCAL:
            left = [self.micro_batches]

            def change(gradient: Tensor) -> Tensor | None:
                left[0] -= 1
                if left[0]:  # only in the last micro-batch, and not in a second pass
                    return None
                changed = gradient.clone(memory_format=torch.contiguous_format)
                flip(changed)
                return changed

            return dict(self.replica.unwrapped.named_parameters())[flip.name].register_hook(change)
        return None

    def _on_gradient(self, flip: Flip | None, norm: Tensor) -> None:
        if flip and flip.place == REDUCED:
            flip(self.replica.gradients_by_name()[flip.name].tensor)
        self.options.on_gradient(self.number, norm)

    def remember(self) -> None:
        """Keeps the state, for `reset`."""
        optimizer = self.replica.optimizer
        self._kept = deepcopy((self.replica.unwrapped.state_dict(), optimizer.state_dict()))

    def reset(self) -> None:
        """Restores the state of `remember`."""
        model, optimizer = deepcopy(self._kept)
        self.replica.unwrapped.load_state_dict(model)
        self.replica.optimizer.load_state_dict(optimizer)
        self.replica.gradients.clear()
