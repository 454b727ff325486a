"""Options of strategies whose ranks may share layers, and what is refused of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import Refusal, Task, World

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

    from ddpforge.ranks.collectives import Connected
    from ddpforge.recipe.schema import TrainSection
    from ddpforge.strategies.tensor.plan import Plan, Style
    from ddpforge.strategies.tensor.shares import Shares

__all__ = ["LossParallel", "Sequenced", "Sharing", "Styles", "Tensored"]

Tensored = Annotated[
    int, Field(ge=1, le=2**10, description="Neighbouring ranks that share out each layer; must divide ranks.")
]
Styles = Annotated[
    dict[str, str] | None,
    Field(description="With `tensor`: the styles of layers by glob over their names; absent: the model's own."),
]
Sequenced = Annotated[
    bool, Field(description="With `tensor`: cut what lies between layers (norms, residual stream) by the sequence.")
]
LossParallel = Annotated[
    bool,
    Field(
        description="With `tensor`: keep logits cut by vocabulary, up to the loss, which saves their memory; for tasks"
        " that take cross-entropies of them."
    ),
]


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """The options `tensor`, `plan`, `sequence_parallel` and `loss_parallel` of a strategy."""

    tensor: int = 1
    plan: Mapping[str, str] | None = None
    sequence: bool = False
    loss_parallel: bool = False

    def refusals(self, train: TrainSection) -> Iterator[Refusal]:
        """Options that have no effect without sharing layers, or do not work with it."""
        if self.tensor == 1:
            for key, chosen in (
                ("plan", self.plan),
                ("sequence_parallel", self.sequence),
                ("loss_parallel", self.loss_parallel),
            ):
                if chosen:
                    yield Refusal(
                        f"strategy.{key}",
                        f"strategy.{key} has no effect while strategy.tensor is 1",
                        ("set strategy.tensor, or leave it out",),
                    )
            return
        if self.plan:
            from ddpforge.strategies.tensor.plan import check_words

            try:
                check_words(self.plan)
            except UsageError as error:
                yield Refusal("strategy.plan", error.message, error.hints)
        if train.compile != "off":
            yield Refusal(
                "train.compile",
                f'train.compile = "{train.compile}" cannot follow the collectives and the random numbers of each rank '
                f"within layers, which strategy.tensor = {self.tensor} puts there",
                ('set train.compile = "off", or strategy.tensor = 1',),
            )

    def check(self, model: nn.Module, task: Task, blocks: Sequence[nn.Module]) -> None:
        """Reads the plan of which layers are cut how."""
        if self.tensor > 1:
            self._resolved(model, blocks)
        if self.loss_parallel and not task.takes_split_logits:
            raise UsageError(
                f"strategy.loss_parallel = true leaves logits in parts, and {type(task).__name__} wants them whole",
                hints=[
                    "leave strategy.loss_parallel out",
                    "or set takes_split_logits = True in the task, if all it does with logits is cross_entropy",
                ],
            )

    def check_data(self, data: Any) -> None:
        """Asks whether sequences can be cut."""
        if self.sequence and isinstance(length := getattr(data, "block_size", None), int):
            from ddpforge.strategies.tensor.shares import refuse_uneven

            refuse_uneven(length, self.tensor)

    def attach(
        self, model: nn.Module, blocks: Sequence[nn.Module], ranks: Connected, mesh: DeviceMesh | None, world: World
    ) -> Shares | None:
        """Makes layers compute shares among `ranks`, which `mesh` has too; their weights are still whole."""
        if self.tensor == 1:
            return None
        from ddpforge.strategies.tensor.shares import Shares

        logits = mesh if self.loss_parallel else None
        shares = Shares(self._resolved(model, blocks), ranks, world.device, sequence=self.sequence, logits=logits)
        shares.attach(model)
        return shares

    def try_out(self, optimizer: Optimizer, device: torch.device) -> None:
        """Raises StrategyError for an optimizer that does not do with shares what it does with a whole weight."""
        if self.tensor > 1:
            import torch

            from ddpforge.strategies.optimizer_trial import refuse_unlike

            refuse_unlike(
                optimizer,
                device,
                [partial(torch.narrow, dim=dim, start=0, length=2) for dim in (0, 1)],
                fails="cannot be used on shares of weights",
                differs="updates a share of a weight otherwise than the whole",
                hints=["set strategy.tensor = 1", "or use AdamW, SGD or another element-wise optimizer"],
            )

    def losses(self) -> AbstractContextManager[Any]:
        """Wraps what computes a loss of logits that ranks share, and its backward pass; not to be nested."""
        if not self.loss_parallel:
            return nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        return loss_parallel()

    def styles(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[str, Style]:
        """Says how each module is shared, by full name."""
        return self._resolved(model, blocks).styles if self.tensor > 1 else {}

    def _resolved(self, model: nn.Module, blocks: Sequence[nn.Module]) -> Plan:
        from ddpforge.strategies.tensor.plan import resolve

        return resolve(
            model, self.plan, blocks, ranks=self.tensor, sequence=self.sequence, split_logits=self.loss_parallel
        )
