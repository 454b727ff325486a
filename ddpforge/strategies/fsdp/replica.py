"""Replica for FSDP: steps of a sharded model, and its state for checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Compute, Pass, SavedTensor, TensorShard
from ddpforge.strategies import named_state
from ddpforge.strategies.fsdp.shards import DTensorWeights, clip_local, local, reshard, shard_like
from ddpforge.strategies.fsdp.wrap_units import GradientCoverage
from ddpforge.strategies.gradients import EVERY_PASS
from ddpforge.strategies.tensor.tensor_parallel import TensorParallelGradients
from ddpforge.strategies.torch_replica import TorchReplica

if TYPE_CHECKING:
    from ddpforge.strategies.fsdp.strategy import FSDP


__all__ = ["FSDPReplica"]


class FSDPReplica(TorchReplica):
    """Replica with this rank's shards of the model."""

    def __init__(self, strategy: FSDP, model: nn.Module, optimizer: Optimizer) -> None:
        weights = DTensorWeights(model, strategy.layout.part, strategy.partial)
        super().__init__(strategy, model, optimizer, weights, unused_hints=EVERY_PASS)
        self._strategy, self._model = strategy, cast(FSDPModule, model)
        self._used = GradientCoverage(model)
        self._shared: TensorParallelGradients | None = None
        if shares := strategy.shares:
            self._shared = TensorParallelGradients(shares.ranks, cut=shares.cuts, summed=shares.summed)

    # -- one step
    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs the passes one after the other; a loss of split logits becomes a plain tensor."""

        def whole(module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
            loss, outputs = compute(module, one)
            return (loss.to_local() if isinstance(loss, DTensor) else loss), outputs

        return super().run_microbatches(passes, whole, trains=trains)

    @contextmanager
    def select_update(self, name: str) -> Iterator[None]:
        """Also gathers weights again: gathered weights take over `requires_grad` only when they are gathered."""
        reshard(self.unwrapped)
        try:
            with super().select_update(name):
                yield
        finally:
            reshard(self.unwrapped)

    @contextmanager
    def exact(self) -> Iterator[bool]:
        """Yields False, and keeps the run's precision, if weights are gathered in it: float32 does not take them."""
        if not self._strategy.gathers_exactly:
            yield False
            return
        with super().exact() as exact:
            yield exact

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Wraps a forward pass in autocast without copies of gathered weights, and allows losses of split logits."""
        with self._strategy.sharing.losses(), self.precision.sharded_forward(compiled=self.train.compile != "off"):
            yield

    @contextmanager
    def forward(self, *, last: bool = True) -> Iterator[None]:
        """Also postpones communication to the last micro-batch: the all-reduce over replicas, or all of it.

        Raises StrategyError for code that reads weights where they are sharded.
        """
        if self._strategy.no_sync:
            self._model.set_requires_gradient_sync(last)
        elif self._strategy.replicas > 1:
            self._model.set_requires_all_reduce(last)
        with super().forward(last=last), self._strategy.partial.refused():
            yield

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        """Adds the gradients of `loss` times `scale`; raises StrategyError if a trained parameter gets none."""
        # If ranks use different parameters in a micro-batch, FSDP adds gradients of different parameters.
        with self._strategy.sharing.losses():
            super().backward(loss, scale)
        trained, names = self.gradients.trained, self.gradients.names
        if not self._used.all_of(len(trained)):
            unused = [p for p in trained if names[id(p)] not in self._used]
            self.gradients.check_unused(unused, " for the samples of a micro-batch")
        self._used.clear()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Returns the norm over all shards, the same bits on every rank.

        It costs an all-reduce of a number, another with tensor parallelism, and a broadcast with replicas.
        """
        if self._shared is None:
            square = torch.nn.utils.get_total_norm(local(gradients)).square()
        else:
            names = [self.gradients.names[id(p)] for p in self.gradients.parameters if p.grad is not None]
            mine = dict(zip(names, local(gradients), strict=True))
            self._shared.add_up(mine)
            square = self._shared.square(mine) + 0  # the addition waits for the all-reduce
        square = square.to(self.world.device)
        mesh = self._strategy.mesh
        dist.all_reduce(square, group=mesh.get_group(-1))
        if mesh.ndim > 1:
            # Groups may add in another order. A norm with another last bit would move the replicas' weights apart.
            dist.broadcast(square, group=mesh.get_group(0), group_src=0)
        # An optimizer on the host must not read the number before its copy to the host has ended.
        return square.sqrt().cpu() if self._strategy.cpu_offload else square.sqrt()

    def held(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Returns this rank's shards of the gradients."""
        return local(gradients)

    def clip(self, largest: float, norm: Tensor) -> None:
        """Scales this rank's shards."""
        clip_local(self.gradients.trained, largest, norm)

    # -- to disk and back
    def state(self) -> CanonicalState[Tensor | TensorShard]:
        """Returns this rank's shards."""
        reshard(self.unwrapped)
        state = named_state.capture(self.unwrapped, self.optimizer)
        _reject_own_shapes(state)
        layout = self._strategy.layout
        return CanonicalState(
            model=layout.parts(state.model),
            optimizer={name: layout.state(name, entry) for name, entry in state.optimizer.items()},
            aliases=state.aliases,
            extra_state=self.remembered(),
            scalars=self.precision.state(),
        )

    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Reads this rank's shards."""
        reshard(self.unwrapped)
        _reject_own_shapes(state)
        part_of = self._strategy.layout.part
        named_state.restore(self.unwrapped, self.optimizer, state, partial=partial, part_of=part_of, like=shard_like)
        self.remember(state)


def _reject_own_shapes(state: CanonicalState[Any]) -> None:
    for name, entry in state.optimizer.items():
        for key, value in entry.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and name in state.model and shape != tuple(state.model[name].shape):
                raise CheckpointError(
                    f"the optimizer keeps `{key}` of `{name}` in a different shape, {list(shape)}: it cannot be split "
                    "over ranks like the weight",
                    hints=['set strategy.use = "ddp", or use AdamW, SGD or another element-wise optimizer'],
                )
