"""Options for tensor parallelism within a strategy, and their checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import Task, Unsupported, World

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ddpforge.ranks.collectives import CollectiveRanks
    from ddpforge.recipe.schema import TrainSection
    from ddpforge.strategies.tensor.sharding_plan import ShardingPlan, Style
    from ddpforge.strategies.tensor.tensor_parallel import TensorParallel

__all__ = ["LossParallel", "Sequenced", "Styles", "TensorParallelOptions", "Tensored"]

Tensored = Annotated[
    int,
    Field(
        ge=1, le=2**10, description="Neighbouring ranks that each compute a share of every layer; must divide ranks."
    ),
]
Styles = Annotated[
    dict[str, str] | None,
    Field(description="With `tensor`: styles of layers, by glob over their names; absent: the model's own plan."),
]
Sequenced = Annotated[
    bool,
    Field(description="With `tensor`: cut activations between layers (norms, residual stream) along the sequence."),
]
LossParallel = Annotated[
    bool,
    Field(
        description="With `tensor`: keep logits split along the vocabulary up to the loss, which saves memory; for"
        " tasks that compute only cross-entropies of logits."
    ),
]


@dataclass(frozen=True, kw_only=True)
class TensorParallelOptions:
    """Options `tensor`, `plan`, `sequence_parallel` and `loss_parallel` of a strategy."""

    tensor: int = 1
    plan: Mapping[str, str] | None = None
    sequence: bool = False
    loss_parallel: bool = False

    def unsupported(self, train: TrainSection) -> Iterator[Unsupported]:
        """Refuses options that have no effect without tensor parallelism, or do not work with it."""
        if self.tensor == 1:
            for key, chosen in (
                ("plan", self.plan),
                ("sequence_parallel", self.sequence),
                ("loss_parallel", self.loss_parallel),
            ):
                if chosen:
                    yield Unsupported(
                        f"strategy.{key}",
                        f"strategy.{key} has no effect while strategy.tensor is 1",
                        ("set strategy.tensor, or remove this option",),
                    )
            return
        if self.plan:
            from ddpforge.strategies.tensor.sharding_plan import check_words

            try:
                check_words(self.plan)
            except UsageError as error:
                yield Unsupported("strategy.plan", error.message, error.hints)
        if train.compile != "off":
            yield Unsupported(
                "train.compile",
                f'train.compile = "{train.compile}" cannot compile the collectives and the random numbers of each rank '
                f"that strategy.tensor = {self.tensor} adds within layers",
                ('set train.compile = "off", or strategy.tensor = 1',),
            )

    def check(self, model: nn.Module, task: Task, blocks: Sequence[nn.Module]) -> None:
        """Raises UsageError or StrategyError if the model or the task does not support these options."""
        if self.tensor > 1:
            self._resolved(model, blocks)
        if self.loss_parallel and not task.takes_split_logits:
            raise UsageError(
                f"strategy.loss_parallel = true keeps logits split, but {type(task).__name__} needs whole logits",
                hints=[
                    "remove strategy.loss_parallel",
                    "or set takes_split_logits = True in the task, if it passes logits only to cross_entropy",
                ],
            )

    def check_data(self, data: Any) -> None:
        """Raises UsageError if sequences of the dataset's `block_size` cannot be cut."""
        if self.sequence and isinstance(length := getattr(data, "block_size", None), int):
            from ddpforge.strategies.tensor.tensor_parallel import check_divisible

            check_divisible(length, self.tensor)

    def attach(
        self,
        model: nn.Module,
        blocks: Sequence[nn.Module],
        ranks: CollectiveRanks,
        mesh: DeviceMesh | None,
        world: World,
    ) -> TensorParallel | None:
        """Makes layers compute shares among `ranks`, the ranks of `mesh`; `TensorParallel.cut` cuts weights later."""
        if self.tensor == 1:
            return None
        from ddpforge.strategies.tensor.tensor_parallel import TensorParallel

        logits = mesh if self.loss_parallel else None
        shares = TensorParallel(
            self._resolved(model, blocks), ranks, world.device, sequence=self.sequence, logits=logits
        )
        shares.attach(model)
        return shares

    def try_out(self, optimizer: Optimizer, device: torch.device) -> None:
        """Raises StrategyError if the optimizer updates shares of a weight differently from the whole weight."""
        if self.tensor > 1:
            import torch

            from ddpforge.strategies.optimizer_probe import check_same_update

            check_same_update(
                optimizer,
                device,
                [partial(torch.narrow, dim=dim, start=0, length=2) for dim in (0, 1)],
                fails="cannot be used on shares of weights",
                differs="updates a share of a weight differently from the whole",
                hints=["set strategy.tensor = 1", "or use AdamW, SGD or another element-wise optimizer"],
            )

    def losses(self) -> AbstractContextManager[Any]:
        """Wraps the loss of split logits and its backward pass; must not be nested."""
        if not self.loss_parallel:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def styles(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[str, Style]:
        """Returns the style of each shared module by fully qualified name."""
        return self._resolved(model, blocks).styles if self.tensor > 1 else {}

    def _resolved(self, model: nn.Module, blocks: Sequence[nn.Module]) -> ShardingPlan:
        from ddpforge.strategies.tensor.sharding_plan import resolve

        return resolve(
            model, self.plan, blocks, ranks=self.tensor, sequence=self.sequence, split_logits=self.loss_parallel
        )
