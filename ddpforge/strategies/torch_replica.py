"""Replicas with gradients in `.grad` and a torch optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddpforge import compat
from ddpforge.interfaces import (
    CanonicalState,
    FullWeights,
    MultiPassOptimizer,
    Replica,
    SavedTensor,
    Strategy,
    TensorShard,
    Weights,
    device_kind,
)
from ddpforge.strategies import named_state
from ddpforge.strategies.buffers import equalise_buffers
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer, member_optimizers
from ddpforge.strategies.gradients import Gradients
from ddpforge.strategies.optimizer_extra_state import OptimizerExtraState
from ddpforge.strategies.optimizer_probe import check_sparse_gradients
from ddpforge.strategies.parameter_guard import check_loss, guarded_forward
from ddpforge.strategies.precision import check_float64, precision_for

__all__ = ["TorchReplica", "WholeReplica"]


class TorchReplica(Replica):
    """Replica that computes in the recipe's precision and clips by the norm of all gradients.

    It skips an update if that norm is not finite.
    A subclass passes this rank's part of the weights as `weights`, and synchronises gradients over ranks before `step`
    measures them. `module` is the wrapped model, if there is a wrapper.

    A subclass that shards weights defines `state` and `load_state`, with the help of `named_state`, `remembered` and
    `remember`. It also defines `norm` (over all shards), `clip` (scales its shards) and `held` (this rank's elements of
    gradients, for callbacks). It need not implement `train.precision`, `train.compile` and `train.clip_norm`.
    """

    def __init__(
        self,
        strategy: Strategy,
        bare: nn.Module,
        optimizer: Optimizer,
        weights: Weights,
        *,
        module: nn.Module | None = None,
        may_be_unused: bool = False,
        unused_hints: Sequence[str] = (),
        missing: Callable[[], Sequence[int]] | None = None,
    ) -> None:
        """Raises StrategyError if `strategy` cannot train the model with this optimizer.

        `missing` is as in `Gradients`.
        """
        self.unwrapped, self.module, self.optimizer = bare, module or bare, optimizer
        self.weights = weights
        self.world, self.train = strategy.world, strategy.train
        updated = (parameter for group in optimizer.param_groups for parameter in group["params"])
        gradients_on = next((parameter.device for parameter in updated), None)
        self.precision = precision_for(self.train.precision, self.world.device, gradients_on)
        self.clip_norm = self.train.clip_norm
        self.gradients = Gradients(
            bare, self.world.global_ranks, may_be_unused=may_be_unused, hints=unused_hints, missing=missing
        )
        self._updates = {
            name: Gradients(
                bare,
                self.world.global_ranks,
                may_be_unused=may_be_unused,
                hints=[f"or give it to another update: optimizer.updates.{name}.parameters", *unused_hints],
                some=[parameter for group in part.param_groups for parameter in group["params"]],
            )
            for name, part in (optimizer.parts.items() if isinstance(optimizer, AlternatingOptimizer) else ())
        }
        self._shards = strategy.contract.shards
        parts = dict(member_optimizers(optimizer))
        self._own = [OptimizerExtraState(member, name, parts) for name, member in parts.items()]
        self.updated = False  # True after the first step of this process
        check_sparse_gradients(optimizer, bare, sharded=bool(self._shards))
        check_float64(bare, self.train)
        self.compile(self.module)

    def compile(self, module: nn.Module) -> None:
        """Compiles `module` in place, if the recipe compiles the whole model."""
        if self.train.compile != "off" and not self.train.compile_blocks:
            # In place, so that state keeps its names; the wrapper, so that DDP's buckets still overlap with backward.
            module.compile(mode=self.train.compile)

    # -- one step
    @contextmanager
    def select_update(self, name: str) -> Iterator[None]:
        """Freezes other updates' parameters within the block; uses this update's optimizer, gradients and clip norm."""
        whole, everything = cast(AlternatingOptimizer, self.optimizer), self.gradients
        own = self._updates[name]
        others = [parameter for parameter in own.frozen if parameter.requires_grad]
        self.optimizer, self.gradients = whole.parts[name], own
        self.clip_norm = whole.clip_norms[name] or self.train.clip_norm
        try:
            for parameter in others:
                parameter.requires_grad_(False)
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)
            self.optimizer, self.gradients, self.clip_norm = whole, everything, self.train.clip_norm

    def forward(self, *, last: bool = True) -> AbstractContextManager[Any]:
        """Returns autocast for bf16 and fp16, nothing for fp32; also checks training passes before the first update."""
        if self.updated or not self.unwrapped.training:
            return self.autocast()
        return self._watched()

    @contextmanager
    def exact(self) -> Iterator[bool]:
        """Computes in float32 within the block; yields False if TF32 is allowed, else True."""
        before, self.precision = self.precision, precision_for("fp32", self.world.device)
        try:
            yield not (self.train.tf32 and self.world.device.type == "cuda")
        finally:
            self.precision = before

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the precision's context for a forward pass."""
        return self.precision.forward()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        with (
            self.autocast(),
            guarded_forward(
                self.unwrapped,
                shards_weights="weights" in self._shards,
                shards_gradients=bool(self._shards),
                eager=self.train.compile == "off",
            ),
        ):
            yield

    def backward(self, loss: Tensor, scale: Tensor | float = 1.0) -> None:
        """Adds the gradients of `loss` times `scale`, and for fp16 times the loss scale."""
        if loss.ndim or not loss.requires_grad:
            check_loss(loss)
        self.precision.backward(loss, scale)

    def step(self) -> Tensor:
        """Unscales, measures the norm, clips, updates, clears: in this order at every precision."""
        self.updated = True
        if self.precision.scales:
            self.precision.unscale(self.optimizer)
        norm = self.norm(self.gradients.collect())
        self.on_gradient(norm)
        if self.clip_norm is not None and not self._is_within(norm, self.clip_norm):
            self.clip(self.clip_norm, norm)

        self.precision.update(self.optimizer, norm)
        self.gradients.clear()
        return norm

    def perturb(self, optimizer: MultiPassOptimizer) -> Tensor:
        """Unscales, measures the norm, calls `optimizer.perturb` with it if it is finite, and clears."""
        self.precision.unscale(cast(Optimizer, optimizer))
        norm = self.norm(self.gradients.collect())
        self.precision.leave()
        if math.isfinite(number := norm.item()):
            optimizer.perturb(number)
        self.gradients.clear()
        return norm

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Returns the norm of all gradients together (0-d)."""
        # torch 2.11 has no norm of sparse tensors. `torch.nn.utils.get_total_norm` does the same in twice the time.
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        norm: Tensor = torch.linalg.vector_norm(torch.stack(compat.foreach("norm", dense)))
        return norm

    def _is_within(self, norm: Tensor, largest: float) -> bool:
        """True if clipping would change nothing; always False on a GPU, because reading the norm would wait for it."""
        epsilon = 1e-6  # of torch's clipping
        return device_kind(self.precision.device).is_host and norm.item() + epsilon <= largest

    def clip(self, largest: float, norm: Tensor) -> None:
        """Scales the gradients down from the norm `norm` to the norm `largest`."""
        torch.nn.utils.clip_grads_with_norm_(self.gradients.trained, largest, norm)

    def gradients_by_name(self) -> Mapping[str, TensorShard]:
        """Returns this rank's parts of the gradients in `.grad`; `held` returns their elements."""
        names, parts = self.gradients.names, self.weights.shards()
        found = {names[id(p)]: p.grad for p in self.gradients.trained if p.grad is not None}
        return dict(
            zip(found, map(TensorShard.of, (parts[name] for name in found), self.held(found.values())), strict=True)
        )

    def held(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Returns this rank's elements of gradients, as views."""
        return [gradient.detach() for gradient in gradients]

    def overflowed(self) -> bool:
        """True if a non-finite norm only lowered the loss scale of fp16."""
        return self.precision.overflowed()

    def sync_buffers(self) -> None:
        """Averages BatchNorm's statistics over ranks, and sets other buffers to rank 0's values."""
        equalise_buffers(self.unwrapped, self.world.global_ranks)

    # -- to disk and back
    def remembered(self) -> Mapping[str, Any]:
        """Returns the optimizer's state that belongs to no parameter."""
        return {name: value for own in self._own for name, value in own.capture().items()}

    def remember(self, state: CanonicalState[SavedTensor]) -> None:
        """Restores the state from `remembered`, and the loss scale of fp16."""
        for own in self._own:
            own.restore(state.extra_state)
        self.precision.load_state(state.scalars)


class WholeReplica(TorchReplica):
    """Replica with the whole model on this rank; a subclass averages the gradients over ranks."""

    def __init__(self, strategy: Strategy, bare: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        """Passes `options` to TorchReplica."""
        super().__init__(strategy, bare, optimizer, FullWeights(bare, strategy.world.global_ranks), **options)

    def compile_loss(self, loss: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor] | None:
        """Compiles the loss with the whole model; but not inside a wrapper, which divides the graph."""
        if self.train.compile == "off" or self.train.compile_blocks or self.module is not self.unwrapped:
            return None
        return torch.compile(loss, mode=self.train.compile)

    def state(self) -> CanonicalState[Tensor | TensorShard]:
        """Returns the whole state, which every rank holds."""
        state = named_state.capture(self.unwrapped, self.optimizer)
        return replace(state, extra_state=self.remembered(), scalars=self.precision.state())

    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Restores the whole state on every rank."""
        named_state.restore(self.unwrapped, self.optimizer, state, partial=partial)
        self.remember(state)
