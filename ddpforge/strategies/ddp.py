"""Data parallelism with torch's DDP: every rank holds the whole model; gradients are averaged during backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.errors import StrategyError
from ddpforge.interfaces import Contract, Replica, Strategy

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from ddpforge.strategies.ddp_replica import Wrapped

__all__ = ["DDP"]

_REDUCED = {
    "none": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
}
_UNUSED = ("or set strategy.find_unused_parameters = true, which walks the graph in every step",)


class DDP(Strategy):
    """torch's DistributedDataParallel: NCCL on CUDA, gloo on CPUs.

    See https://docs.pytorch.org/docs/stable/generated/torch.nn.parallel.DistributedDataParallel.html and Li et al.,
    "PyTorch Distributed" (VLDB 2020).
    """

    contract = Contract(
        clipping="identically on every rank, after the all-reduce, by the norm of all gradients",
        accumulation="autograd, in the parameters' .grad; one all-reduce per step, in the last micro-batch",
        reads_gradients=True,
        optimizers="several",
        float8=True,
    )

    def __init__(
        self,
        *,
        bucket_cap_mb: Annotated[
            int, Field(ge=1, le=100_000, description="Size in MiB of the buckets in which gradients are all-reduced.")
        ] = 25,
        find_unused_parameters: Annotated[
            bool, Field(description="Allow parameters that a forward pass does not use; walks the graph in every step.")
        ] = False,
        static_graph: Annotated[
            bool, Field(description="Promise that every step uses the same parameters in the same order.")
        ] = False,
        gradient_as_bucket_view: Annotated[
            bool, Field(description="Let .grad point into the buckets, which saves one copy of the gradients.")
        ] = True,
        compression: Annotated[
            Literal["none", "fp16", "bf16"],
            Field(description="Compress gradients for the all-reduce; results then differ from those of one process."),
        ] = "none",
    ) -> None:
        self._may_be_unused = find_unused_parameters or static_graph
        self._compression = compression
        self.contract = replace(self.contract, reduce_dtype=_REDUCED[compression])
        self._options: dict[str, Any] = {
            "init_sync": False,  # `_share` does it
            "bucket_cap_mb": bucket_cap_mb,
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
        }

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Wraps the model in DistributedDataParallel; on a single rank the model stays as it is."""
        from ddpforge import compat
        from ddpforge.strategies.composite_optimizer import AlternatingOptimizer
        from ddpforge.strategies.ddp_replica import DDPReplica
        from ddpforge.strategies.torch_replica import WholeReplica

        if self.world.global_ranks.size == 1:
            return WholeReplica(self, model, optimizer, may_be_unused=self._may_be_unused, unused_hints=_UNUSED)
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise StrategyError(
                f"DDP over {self.world.global_ranks.size} ranks needs a parameter to train, but the model has none",
                hints=["set requires_grad = True for the parameters to train"],
            )
        self._share(model)
        if isinstance(optimizer, AlternatingOptimizer):
            wrapped = {name: self._wrapped(model, part.param_groups) for name, part in optimizer.parts.items()}
        else:
            wrapped = {"": self._wrapped(model, [{"params": list(model.parameters())}])}
        keeps = self._options["gradient_as_bucket_view"] and not self._may_be_unused and "" in wrapped
        return DDPReplica(
            self,
            model,
            optimizer,
            wrapped=wrapped,
            # If `.grad` were dropped, gradients would accumulate outside of the buckets and take twice the memory.
            missing=compat.unreduced(wrapped[""].module) if keeps and self._accumulates else None,
            may_be_unused=self._may_be_unused,
            unused_hints=_UNUSED,
        )

    @property
    def _accumulates(self) -> bool:
        ranks = self.world.dp_ranks.size
        return self.train.per_pass(ranks) * ranks < self.train.global_batch

    def _share(self, model: nn.Module) -> None:
        """Broadcasts rank 0's parameters and buffers; raises StrategyError if the models of two ranks differ."""
        named = [*model.named_parameters(), *model.named_buffers()]
        forms = self.world.global_ranks.all_gather_object(
            [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in named]
        )
        for rank, form in enumerate(forms):
            if form != forms[0]:
                name = next((mine or other or ("",))[0] for mine, other in zip_longest(form, forms[0]) if mine != other)
                raise StrategyError(
                    f"the model on rank {rank} differs from the model on rank 0, first in `{name}`",
                    hints=["build the same model on every rank: its constructor must not depend on the rank"],
                )
        for _, tensor in named:  # DDP's own broadcast fails for some dtypes
            self.world.global_ranks.broadcast(tensor)

    def _wrapped(self, model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> Wrapped:
        """Wraps the model in DistributedDataParallel for the parameters in `groups`.

        Each update has a wrapper with its own buckets, which neither waits for nor sends other updates' gradients.
        """
        from ddpforge.strategies.ddp_replica import Wrapped

        mine = {id(parameter) for group in groups for parameter in group["params"] if parameter.requires_grad}
        return Wrapped.of(model, mine, self._options, self._compression)
