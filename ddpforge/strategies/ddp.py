"""Native data parallelism: every rank holds the model, gradients are averaged while backward still runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Annotated, Any, Literal

from accelerate.utils import DistributedDataParallelKwargs, KwargsHandler
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddpforge.errors import StrategyError
from ddpforge.interfaces import CanonicalState, Contract, Part, SavedTensor
from ddpforge.strategies.accelerated import AcceleratedStrategy
from ddpforge.strategies.hold_back import HoldBack
from ddpforge.strategies.powersgd import PowerSGD

__all__ = ["DDP"]

_HOOKS: dict[str, tuple[Callable[..., Any] | None, str]] = {
    "none": (None, "float32"),
    "fp16": (default_hooks.fp16_compress_hook, "float16"),
    "bf16": (default_hooks.bf16_compress_hook, "bfloat16"),
    "powersgd": (None, "float32, of a low-rank approximation"),  # its hook has a memory, see `PowerSGD`
}


class DDP(AcceleratedStrategy):
    """torch's DistributedDataParallel: NCCL on CUDA, gloo on CPUs.

    See https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html and Li et al.,
    "PyTorch Distributed" (VLDB 2020).
    """

    contract = Contract(
        clips="every rank alike, after the all-reduce, by the norm of all gradients",
        accumulates="autograd, in the parameters' .grad; one all-reduce per step, in the last micro-batch",
    )

    unused_hints = ("or set strategy.find_unused_parameters = true, which costs a walk of the graph at every step",)

    def __init__(
        self,
        *,
        bucket_cap_mb: Annotated[
            int, Field(ge=1, le=100_000, description="Size in MiB of the buckets in which gradients are all-reduced.")
        ] = 25,
        find_unused_parameters: Annotated[
            bool, Field(description="Allow parameters that a forward pass does not use; walks the graph at every step.")
        ] = False,
        static_graph: Annotated[
            bool, Field(description="Promise that every step uses the same parameters in the same order.")
        ] = False,
        gradient_as_bucket_view: Annotated[
            bool, Field(description="Let .grad point into the buckets, which saves one copy of the gradients.")
        ] = True,
        compression: Annotated[
            Literal["none", "fp16", "bf16", "powersgd"],
            Field(description="Compress gradients for the all-reduce; the result is no longer that of one process."),
        ] = "none",
        powersgd_rank: Annotated[
            int, Field(ge=1, le=1024, description="Rank of PowerSGD's approximation (Vogels et al., 2019).")
        ] = 1,
        powersgd_start: Annotated[
            int, Field(ge=2, le=2**31, description="Steps of plain all-reduce before PowerSGD begins.")
        ] = 1000,
    ) -> None:
        super().__init__()
        self.allows_unused_parameters = find_unused_parameters or static_graph  # type: ignore[misc]
        self._hook, reduce_dtype = _HOOKS[compression]
        self._holds_back: HoldBack | None = None
        self.contract = replace(self.contract, reduce_dtype=reduce_dtype)
        self._powersgd_options = (powersgd_rank, powersgd_start) if compression == "powersgd" else None
        self._powersgd: PowerSGD | None = None
        self.options = DistributedDataParallelKwargs(
            # Buffers are made equal when somebody reads them (evaluation, checkpoints), not at every forward pass.
            broadcast_buffers=False,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            static_graph=static_graph,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )

    def handlers(self) -> list[KwargsHandler]:
        """The DDP options."""
        return [self.options]

    def check(self, model: nn.Module) -> None:
        """With several ranks the model must have become a DistributedDataParallel."""
        if self.world.size > 1 and not isinstance(model, DistributedDataParallel):
            raise StrategyError(
                f"asked for DDP over {self.world.size} ranks, but the prepared model is a {type(model).__name__}",
                hints=["a model without trainable parameters has nothing to synchronise"],
            )

    def distributed(self, model: nn.Module) -> nn.Module:
        """The model as a DistributedDataParallel, with the communication hook that the recipe asks for."""
        prepared = super().distributed(model)
        if not isinstance(prepared, DistributedDataParallel):
            return prepared
        if self._powersgd_options:
            self._powersgd = PowerSGD(*self._powersgd_options, self.world)
            self._powersgd.look_at(model)
            self._hook = self._powersgd.reduce
        if self.options.static_graph:
            self._holds_back = HoldBack(self._hook or default_hooks.allreduce_hook)
            self._hook = self._holds_back.reduce
        if self._hook is not None:
            prepared.register_comm_hook(None, self._hook)
        return prepared

    def micro_step(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Holds the all-reduce back until the step's last micro-batch."""
        if self._holds_back is not None:
            self._holds_back.held = not last
            return nullcontext()
        if last or not isinstance(model, DistributedDataParallel):
            return nullcontext()
        held: AbstractContextManager[Any] = model.no_sync()
        return held

    def state(self, model: nn.Module, optimizer: Optimizer) -> CanonicalState[Tensor | Part]:
        """Every rank holds everything but its own memory of what PowerSGD left out."""
        state = super().state(model, optimizer)
        return replace(state, shared={**state.shared, **self._powersgd.capture()}) if self._powersgd else state

    def load_state(
        self, model: nn.Module, optimizer: Optimizer, state: CanonicalState[SavedTensor], *, partial: bool = False
    ) -> None:
        """Every rank takes everything, and of PowerSGD's memory its own."""
        super().load_state(model, optimizer, state, partial=partial)
        if self._powersgd and not partial:
            self._powersgd.restore(state.shared)
