"""Expert parallelism: each of several neighbouring ranks holds some experts of a layer; tokens travel by all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from ddpforge.errors import UsageError
from ddpforge.interfaces import Compute, ExpertDispatch, Pass, Unsupported, World
from ddpforge.ranks.collectives import ProcessGroup
from ddpforge.strategies.fsdp.mesh import ParallelDims
from ddpforge.strategies.fsdp.replica import FSDPReplica
from ddpforge.strategies.tensor.split_spec import SplitSpec

if TYPE_CHECKING:
    from ddpforge.recipe.schema import TrainSection

__all__ = ["ExpertParallel", "ExpertReplica", "check_experts", "unsupported_experts"]


class ExpertParallel(ExpertDispatch):
    """Experts spread evenly over `size` neighbouring ranks, with an all-to-all there and back (Lepikhin et al.,
    "GShard", 2020).

    All ranks see different samples. Ranks at the same place of their groups hold the same experts and shard them over
    `mesh`.
    """

    def __init__(self, world: World, size: int) -> None:
        names = ("same", "experts")
        grid = init_device_mesh(world.device.type, (world.global_ranks.size // size, size), mesh_dim_names=names)
        self.groups, self.mesh = grid.get_all_groups(), grid["same"]
        self._group = grid.get_group("experts")
        self._ranks = ProcessGroup(self._group, world.device)
        self.cuts: dict[str, SplitSpec] = {}  # by parameter name
        self._counts: list[int] | None = None

    # -- where experts are
    def take(self, model: nn.Module, part: nn.Module, shard: Callable[[nn.Module], Any]) -> None:
        """Keeps only this rank's experts in a part of the model, and calls `shard` on each module of experts."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for module in modules_with_experts(part):
            if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
                continue  # already done, as part of a block
            for parameter in module.parameters():
                cut = SplitSpec(tuple(parameter.shape), 0, self._ranks.rank, self._ranks.size)
                self.cuts[names[id(parameter)]] = cut
                parameter.data = cut.take(parameter.data)
            module.experts = self
            shard(module)

    # -- calls of the model
    def compute(self, slots: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Sends slots [experts, slots, width] to the ranks of their experts; returns the experts' results, as sent."""
        experts, mine, width = slots.shape
        if self._counts is None:  # slots of an expert on each rank: the same for all layers of a pass
            # The last step of an epoch may give ranks different numbers of samples.
            self._counts = self._ranks.all_gather_object(mine)
        each, counts = experts // self._ranks.size, self._counts
        there, here = [each * mine] * self._ranks.size, [each * count for count in counts]
        # FSDP averages an expert's gradients over the ranks that hold it. Each of these computes the tokens of its
        # whole group, so its gradients are divided by the size of the group. The mean is then over all ranks, as for
        # other weights.
        share = 1 / self._ranks.size
        received: Tensor = _AllToAll.apply(slots.flatten(0, 1), self._group, there, here, 1 / share)
        whole = torch.cat([rows.view(each, -1, width) for rows in torch.split(received, here)], dim=1)
        found = torch.cat([rows.flatten(0, 1) for rows in torch.split(compute(whole), counts, dim=1)])
        returned: Tensor = _AllToAll.apply(found, self._group, here, there, share)
        return returned.view(experts, mine, width)

    def forget(self, one: Pass) -> None:
        """Forgets the numbers of slots, which belong to one batch, and seeds the pass."""
        self._counts = None
        one.seed()


class _AllToAll(torch.autograd.Function):
    """All-to-all of rows in a group: `there` are the rows sent to each rank, `here` the rows received from each.

    The backward pass returns the gradients, times `factor`.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, group: dist.ProcessGroup, there: list[int], here: list[int], factor: float
    ) -> Tensor:
        ctx.way = group, there, here, factor
        return _exchanged(rows, group, there, here)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        group, there, here, factor = ctx.way
        return _exchanged(gradient * factor, group, here, there), None, None, None, None


def _exchanged(rows: Tensor, group: dist.ProcessGroup, there: list[int], here: list[int]) -> Tensor:
    found = rows.new_empty(sum(here), *rows.shape[1:])
    dist.all_to_all_single(found, rows.contiguous(), here, there, group=group)
    return found


class ExpertReplica(FSDPReplica):
    """Replica with shards of a model with experts that are distributed over ranks."""

    def __init__(self, spread: ExpertParallel, *parts: Any) -> None:
        super().__init__(*parts)
        self._spread = spread

    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs the passes one after the other; batches may differ in size."""
        own = (replace(one, seed=partial(self._spread.forget, one)) for one in passes)
        return super().run_microbatches(own, compute, trains=trains)


# ---------------------------------------------------------------------------------------------- checks
def modules_with_experts(model: nn.Module) -> list[Any]:
    """Returns the modules of a model that hold experts."""
    return [module for module in model.modules() if isinstance(getattr(module, "experts", None), ExpertDispatch)]


def unsupported_experts(
    experts: int, grid: ParallelDims, train: TrainSection, ranks: int, *, cpu_offload: bool
) -> Iterator[Unsupported]:
    """Refuses a size that does not divide the ranks, and options that do not work together."""
    if ranks % experts:
        fits = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        message = f"strategy.experts = {experts} does not divide the {ranks} rank{'s' * (ranks > 1)}"
        yield Unsupported("strategy.experts", message, (f"use one of {fits}" if ranks > 1 else "remove it",))
    for key in ("replicas", "context", "tensor"):
        if getattr(grid, key) > 1:
            yield Unsupported(
                f"strategy.{key}",
                f"strategy.{key} and strategy.experts do not work together",
                ("remove one of them",),
            )
    if cpu_offload:
        yield Unsupported(
            "strategy.cpu_offload",
            "strategy.cpu_offload and strategy.experts do not work together",
            ("remove one of them",),
        )
    if train.compile != "off":
        yield Unsupported(
            "train.compile",
            f"strategy.experts = {experts} sends tokens to other ranks within a layer, which cannot be compiled",
            ('set train.compile = "off"', "or remove strategy.experts"),
        )


def check_experts(size: int, model: nn.Module) -> None:
    """Raises UsageError if the experts of a model cannot be spread over `size` ranks."""
    modules = modules_with_experts(model)
    if not modules:
        raise UsageError(
            f"strategy.experts = {size} spreads experts over ranks, but {type(model).__name__} has no such experts",
            hints=[
                'set model.use = "moe_gpt", or give the module with the experts\' weights an attribute '
                "`experts = ddpforge.interfaces.ExpertDispatch()`, and call its `compute` in forward",
                "or remove strategy.experts",
            ],
        )
    for count in {len(parameter) for module in modules for parameter in module.parameters()}:
        if count % size:
            fits = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
            raise UsageError(
                f"strategy.experts = {size} does not divide the {count} experts of a layer",
                hints=[f"use one of {fits}"],
            )
