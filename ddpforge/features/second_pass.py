"""Second pass: the gradient of a rank's last micro-batch, computed again by another rank."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.data import MicroBatch, seed_all, to_device
from ddpforge.data.rng import isolated_rng
from ddpforge.errors import UsageError
from ddpforge.features.bit_hash import BitHash, TensorHashes
from ddpforge.interfaces import Task, World
from ddpforge.strategies.ddp_replica import DDPReplica
from ddpforge.training.buffers import unchanged

__all__ = ["SecondPass", "neighbours"]


def neighbours(ranks: int) -> list[list[int]]:
    """Returns groups of three to five consecutive ranks, or the two ranks of a run with two."""
    count = max(1, ranks // 3)
    bounds = [ranks * one // count for one in range(count + 1)]
    return [list(range(begin, end)) for begin, end in pairwise(bounds)]


@dataclass
class CapturedPass:
    """Pass of a micro-batch with all that its gradient depends on, besides the weights; on the host."""

    data: bytes  # the batch, pickled before the pass, which may change it
    seed: int = 0
    samples: int | None = None
    gradient: Any = None  # of the loss: the factor of the step, times the loss scale of fp16
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # that the pass changed, with their values before


class SecondPass:
    """Computes the last micro-batch of the rank before, in a group of neighbours, once more."""

    def __init__(self, world: World, replica: DDPReplica, task: Task, hashes: BitHash, key: str) -> None:
        ranks = world.global_ranks
        self._groups = neighbours(ranks.size)
        self._rank, self._device = ranks.rank, world.device
        self._replica, self._task, self._hash, self._key = replica, task, hashes, key
        self._group = next(group for group in self._groups if ranks.rank in group)
        self._near = ranks.split(self._groups)
        self._trained = {name: one for name, one in replica.unwrapped.named_parameters() if one.requires_grad}
        self._own: dict[str, Tensor] = {}
        self._hooks: list[Any] = []
        self._captured: CapturedPass | None = None  # of this rank, in a step that is checked
        self._all: list[CapturedPass] = []  # of the group

    def other(self, rank: int, distance: int = 1) -> int:
        """Returns the rank that computes the micro-batch of `rank` again."""
        group = next(one for one in self._groups if rank in one)
        return group[(group.index(rank) + distance) % len(group)]

    def judge(self, rank: int) -> int:
        """Returns the rank whose result decides; of two ranks it is `rank` itself."""
        return self.other(rank, 2)

    def wrap_loss(self, stateful: nn.Module) -> None:
        """Captures the seed of a pass and the gradient of its loss, in steps that are checked."""
        self._stateful = stateful
        loss = self._task.loss

        @wraps(loss)
        def captured(model: nn.Module, batch: Any) -> tuple[Any, Any]:
            one = self._captured
            if one is None or one.gradient is not None:
                return loss(model, batch)
            one.seed, one.samples = torch.initial_seed(), self._task.batch_samples
            before = {name: buffer.detach().clone() for name, buffer in stateful.named_buffers()}
            value, outputs = loss(model, batch)
            changed = ((name, old) for name, old in before.items() if not torch.equal(old, stateful.get_buffer(name)))
            one.buffers = {name: old.cpu() for name, old in changed}
            if isinstance(value, Tensor) and value.requires_grad:  # otherwise the backward pass raises an error
                value.register_hook(partial(setattr, one, "gradient"))  # type: ignore[no-untyped-call]
            return value, outputs

        self._task.loss = captured  # type: ignore[method-assign]
        self._loss = loss

    def arm(self, micro: MicroBatch) -> None:
        """Captures the next pass: hooks hash each gradient before DDP adds it to other micro-batches and ranks."""
        try:
            self._captured, self._own = CapturedPass(pickle.dumps(micro.data)), {}
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{self._key}.local_gradients sends a batch to another rank, but it cannot be pickled: {error}",
                hints=[f"set {self._key}.local_gradients = false"],
                key=f"{self._key}.local_gradients",
            ) from error
        self._hooks = [
            one.register_hook(partial(self._note, name))  # type: ignore[no-untyped-call]
            for name, one in self._trained.items()
        ]

    def _note(self, name: str, gradient: Tensor) -> None:
        self._own[name] = self._hash(gradient)

    def hashes(self, *, measures: bool) -> tuple[TensorHashes, TensorHashes, bool]:
        """Returns the hashes of this rank's gradient and of its neighbour's, computed again. Collective.

        With `measures`, the third value is False if the neighbour's gradient is another one the second time.
        """
        for hook in self._hooks:
            hook.remove()
        mine, self._captured = self._captured, None
        assert mine is not None
        assert mine.gradient is not None
        mine.gradient = mine.gradient.cpu()
        self._all = self._near.all_gather_object(mine)
        own, again = TensorHashes(self._own), self._again(-1)
        return own, again, not measures or self._again(-1).digest == again.digest

    def release(self) -> None:
        """Frees the memory of the micro-batches."""
        self._all = []

    def third(self, differ: Sequence[int]) -> TensorHashes | None:
        """Returns the hashes of the gradient that this rank must judge, if it belongs to a rank in `differ`."""
        judged = next(rank for rank in self._group if self.judge(rank) == self._rank)
        return self._again(-2) if judged in differ else None

    def _again(self, distance: int) -> TensorHashes:
        one = self._all[(self._group.index(self._rank) + distance) % len(self._group)]
        samples = self._task.batch_samples
        with unchanged(self._stateful), isolated_rng(), torch.enable_grad():
            for name, value in one.buffers.items():
                self._stateful.get_buffer(name).data.copy_(value)
            self._task.batch_samples = one.samples
            seed_all(one.seed, self._device)
            batch = self._replica.local_batch(to_device(pickle.loads(one.data), self._device))
            with self._replica.autocast():
                loss, _ = self._loss(self._replica.unwrapped, batch)
            gradients = torch.autograd.grad(
                loss, list(self._trained.values()), one.gradient.to(self._device), allow_unused=True
            )
        self._task.batch_samples = samples
        named = zip(self._trained, gradients, strict=True)
        return TensorHashes({name: self._hash(each) for name, each in named if each is not None})
