"""A sharded model in one step after the other, and to disk and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Part, SavedTensor
from ddpforge.strategies import named_state
from ddpforge.strategies.fsdp.shards import Shards, local, part_of, parts_of, reshard, shard_like
from ddpforge.strategies.torch_replica import TorchReplica

if TYPE_CHECKING:
    from ddpforge.strategies.fsdp.strategy import FSDP


__all__ = ["FSDPReplica"]


class FSDPReplica(TorchReplica):
    """This rank's shards."""

    def __init__(self, strategy: FSDP, model: nn.Module, optimizer: Optimizer) -> None:
        super().__init__(strategy, model, optimizer, Shards(model))
        self._strategy, self._model = strategy, cast(FSDPModule, model)
        self._watch_gradients(model)

    def _watch_gradients(self, model: nn.Module) -> None:
        """Notes which parameters get a gradient in a backward pass, before gradients are reduced over ranks."""
        self._used: set[str] = set()
        self._trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        if hasattr(FSDPModule, "set_reduce_scatter_unused_params"):  # not in torch 2.11
            # Ranks that used different parameters then come to the end of backward, where that is reported.
            self._model.set_reduce_scatter_unused_params(True)
        for prefix, unit in model.named_modules():
            if isinstance(unit, FSDPModule):
                _at_first_forward(cast(nn.Module, unit), partial(self._watch_unit, prefix))

    def _watch_unit(self, prefix: str, unit: nn.Module) -> None:
        """Called while the unit's parameters are gathered: what backward gives gradients to are these, not shards."""
        for name, parameter in unit.named_parameters(prefix):
            if name in self._trained and not isinstance(parameter, DTensor):

                def note(_: Tensor, name: str = name) -> None:
                    self._used.add(name)

                trains = parameter.requires_grad  # not in a turn of others, and there are no hooks without
                parameter.requires_grad_(True).register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(trains)

    # -- one step
    @contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Gathers weights anew, which is when they learn what is frozen."""
        reshard(self.bare)
        try:
            with super().turn(name):
                yield
        finally:
            reshard(self.bare)

    def autocast(self) -> AbstractContextManager[Any]:
        """Autocast that keeps no copies of gathered weights."""
        return self.precision.sharded_forward(compiled=self.train.compile != "off")

    def forward(self, *, last: bool = True) -> AbstractContextManager[Any]:
        """Holds back what need not happen before the last micro-batch: the all-reduce over replicas, or everything."""
        if self._strategy.accumulate == "whole":
            self._model.set_requires_gradient_sync(last)
        elif self._strategy.replicas > 1:
            self._model.set_requires_all_reduce(last)
        return super().forward(last=last)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of `loss`; every trained parameter must get one, on every rank, in every micro-batch.

        Ranks that used different parameters would have added up gradients that do not belong together.
        """
        super().backward(loss)
        trained, names = self.gradients.trained, self.gradients.names
        if len(self._used) != len(trained):
            self.gradients.refuse_unused([p for p in trained if names[id(p)] not in self._used])
        self._used.clear()

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The norm over all shards: one all-reduce of a number."""
        square = torch.nn.utils.get_total_norm(local(gradients)).to(self.world.device).square()
        dist.all_reduce(square, group=self._strategy.mesh.get_group(-1))
        # Where the optimizer updates on the host, it must not look at a number that is still on its way there.
        return square.sqrt().cpu() if self._strategy.cpu_offload else square.sqrt()

    def held(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """The shards."""
        return local(gradients)

    def clip(self, largest: float, norm: Tensor) -> None:
        """torch's own formula, on the shards."""
        factor = (largest / (norm + 1e-6)).clamp(max=1.0)
        shards = local(p.grad for p in self.gradients.trained if p.grad is not None)
        torch._foreach_mul_(shards, factor.to(shards[0].device))

    # -- to disk and back
    def state(self) -> CanonicalState[Tensor | Part]:
        """The shards."""
        reshard(self.bare)
        state = named_state.capture(self.bare, self.optimizer)
        _refuse_own_shapes(state)
        return CanonicalState(
            model=parts_of(state.model),
            optimizer={name: parts_of(entry) for name, entry in state.optimizer.items()},
            aliases=state.aliases,
            shared=self.remembered(),
            numbers=self.precision.state(),
        )

    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Every rank reads its shards."""
        reshard(self.bare)
        _refuse_own_shapes(state)
        named_state.restore(self.bare, self.optimizer, state, partial=partial, part_of=part_of, like=shard_like)
        self.remember(state)


def _at_first_forward(unit: nn.Module, action: Callable[[nn.Module], None]) -> None:
    """Calls `action(unit)` once, when the unit's forward begins and FSDP has gathered its parameters."""

    def hook(module: nn.Module, _: Any) -> None:
        handle.remove()
        action(module)

    handle = unit.register_forward_pre_hook(torch.compiler.disable(hook))  # type: ignore[no-untyped-call]


def _refuse_own_shapes(state: CanonicalState[Any]) -> None:
    for name, entry in state.optimizer.items():
        for key, value in entry.items():
            shape = tuple(getattr(value, "shape", ()))
            if shape and name in state.model and shape != tuple(state.model[name].shape):
                raise CheckpointError(
                    f"the optimizer keeps `{key}` of `{name}` in a shape of its own, {list(shape)}, and which rank "
                    "would have what of it is not known",
                    hints=['set strategy.use = "ddp", or use AdamW, SGD or another element-wise optimizer'],
                )
