"""FSDP2: every rank holds a part of the weights, gradients and optimizer state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import Field

from ddpforge.errors import StrategyError
from ddpforge.interfaces import (
    Contract,
    ForwardSplit,
    Replica,
    Strategy,
    Task,
    Unsupported,
    Weights,
    World,
    device_kind,
)
from ddpforge.strategies.fsdp.mesh import ParallelDims, divisions
from ddpforge.strategies.tensor.options import LossParallel, Sequenced, Styles, Tensored, TensorParallelOptions

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule, OffloadPolicy
    from torch.optim import Optimizer

    from ddpforge.recipe.schema import TrainSection
    from ddpforge.strategies.fsdp.expert_parallel import ExpertParallel
    from ddpforge.strategies.fsdp.shards import ShardLayout
    from ddpforge.strategies.parameter_guard import PartialWeights
    from ddpforge.strategies.tensor.tensor_parallel import TensorParallel

__all__ = ["FSDP"]

_WHOLE = (  # how to read a whole weight
    "call the module that has the parameter, or use it in the forward of its block",
    "or name in train.blocks a class that contains both the parameter and the code that uses it",
    'or set strategy.use = "ddp"',
)


class FSDP(Strategy):
    """torch's `fully_shard` on each of the model's blocks and on the rest of the model.

    See https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html and Zhao et al., "PyTorch FSDP" (VLDB
    2023). With `replicas` the ranks form that number of groups. Each group shards the model among its own ranks, and
    gradients are averaged over the groups (hybrid sharding, HSDP). With `context` neighbouring ranks see the same
    samples, and each computes a part of every sequence; the model must support it. Weights are sharded over these
    ranks too. With `experts` each neighbouring rank holds some of the experts of each layer, and ranks exchange the
    tokens for them. With `tensor` neighbouring ranks compute shares of each layer, according to a plan (Shoeybi et
    al., "Megatron-LM", 2019).
    """

    contract = Contract(
        shards=("weights", "gradients", "optimizer state"),
        clipping="identically on every rank, after the reduce-scatter, by the norm over all shards",
        accumulation="the shards' .grad; one reduce-scatter per micro-batch",
        reads_gradients=True,
        optimizers="several",
        float8=True,
    )
    needs_process_group = True
    partial: PartialWeights  # of the model and of auxiliary modules; set by `prepare`

    def __init__(
        self,
        *,
        replicas: Annotated[
            int, Field(ge=1, le=2**16, description="Groups of ranks that each hold the whole model; must divide ranks.")
        ] = 1,
        context: Annotated[
            int,
            Field(
                ge=1,
                le=2**16,
                description="Neighbouring ranks that each compute a part of the same sequences; must divide ranks, and"
                " its double must divide the length of sequences.",
            ),
        ] = 1,
        experts: Annotated[
            int,
            Field(
                ge=1,
                le=2**12,
                description="Neighbouring ranks over which the experts of a layer are spread; must divide ranks and"
                " experts.",
            ),
        ] = 1,
        tensor: Tensored = 1,
        plan: Styles = None,
        sequence_parallel: Sequenced = False,
        loss_parallel: LossParallel = False,
        reshard_after_forward: Annotated[
            bool, Field(description="Free a block's weights after its forward pass and gather them again for backward.")
        ] = True,
        no_sync: Annotated[
            bool,
            Field(
                description="Reduce gradients only in the last micro-batch of a step, as torch's `no_sync` does, which"
                " saves communication and costs the memory of all gradients."
            ),
        ] = False,
        all_gather_dtype: Annotated[
            Literal["fp32", "compute"] | None,
            Field(
                description='Dtype in which a block\'s weights are gathered: "fp32", or "compute", the dtype of'
                " train.precision, which halves the traffic and also rounds weights that autocast leaves in fp32"
                ' (norms). Absent: "compute" under bf16 on accelerators, but "fp32" for blocks with BatchNorm, and'
                " on CPUs."
            ),
        ] = None,
        cpu_offload: Annotated[
            bool, Field(description="Keep shards and optimizer state in host memory, and update them there.")
        ] = False,
        meta: Annotated[
            bool,
            Field(
                description="Build the model without memory and fill it block by block; every layer with parameters"
                " needs `reset_parameters`."
            ),
        ] = False,
    ) -> None:
        self.experts, self.spread = experts, cast("ExpertParallel | None", None)
        self.reshard_after_forward = reshard_after_forward
        self.no_sync = no_sync
        self.all_gather_dtype = all_gather_dtype
        self.cpu_offload = cpu_offload
        self.meta = meta
        self.sharing = TensorParallelOptions(
            tensor=tensor, plan=plan, sequence=sequence_parallel, loss_parallel=loss_parallel
        )
        self._lay_out(ParallelDims(replicas=replicas, context=context, tensor=tensor))
        self.shares: TensorParallel | None = None
        if tensor > 1:  # layers then compute with shares of weights, which torchao supports only with its own styles
            self.contract = replace(self.contract, float8=False, loss_in_model=False)
        if no_sync:
            self.contract = replace(
                self.contract, accumulation="whole, in fp32; one reduce-scatter per step, in the last micro-batch"
            )

    def _lay_out(self, grid: ParallelDims) -> None:
        shares: dict[ForwardSplit, int] = {"layers": grid.tensor, "positions": grid.context, "experts": self.experts}
        cuts = tuple(what for what, ranks in shares.items() if ranks > 1)
        self.grid, self.contract = grid, replace(self.contract, replicas=grid.replicas, splits_forward=cuts)
        self.replicas, self.context, self.tensor = grid.replicas, grid.context, grid.tensor

    # -- before the loop
    @classmethod
    def layouts(cls, ranks: int) -> Iterator[Mapping[str, Any]]:
        """Yields grids of replicas, positions and layers, and numbers of ranks for experts alone."""
        for sizes in divisions(ranks, "replicas", "context", "tensor"):
            yield sizes
            if "tensor" in sizes:
                yield from (sizes | {"sequence_parallel": True}, sizes | {"loss_parallel": True})
        yield from ({"reshard_after_forward": False}, {"no_sync": True})
        yield from (sizes for sizes in divisions(ranks, "experts") if sizes)

    def for_evaluation(self, ranks: int) -> tuple[FSDP, str]:
        """Returns a strategy without the sizes that do not divide the ranks, and the reason."""
        other, grid = copy(self), self.grid.fitting(ranks)
        other._lay_out(grid)
        if grid.tensor == 1:
            other.sharing = TensorParallelOptions()
        if ranks % self.experts:
            other.experts = 1
        names = ("replicas", "context", "tensor", "experts")
        left = [f"strategy.{name} = {size}" for name in names if (size := getattr(self, name)) != getattr(other, name)]
        if not left:
            return self, ""
        return other, f"{' and '.join(left)} ignored: {ranks} rank{'s' * (ranks > 1)} cannot form this layout"

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Refuses sizes that do not divide the ranks, and options that have no effect or do not work together."""
        yield from self.grid.unsupported(ranks)
        yield from self.sharing.unsupported(train)
        if self.cpu_offload and self.tensor > 1:
            yield Unsupported(
                "strategy.cpu_offload",
                f"strategy.cpu_offload and strategy.tensor = {self.tensor} were never tested together on GPUs",
                ("remove one of them",),
            )
        if self.cpu_offload and device == "cpu":
            yield Unsupported(
                "strategy.cpu_offload",
                "strategy.cpu_offload moves shards from a GPU to the host, but this run is on a CPU",
                ("remove strategy.cpu_offload",),
            )
        if device == "cuda" and train.uses_cuda_graphs:
            yield Unsupported(
                "train.compile",
                f'train.compile = "{train.compile}" replays CUDA graphs, which need weights at fixed addresses, '
                "but FSDP gathers them again for every pass",
                ('set train.compile = "default", or strategy.use = "ddp"',),
            )
        if self.context > 1 and train.compile != "off":
            yield Unsupported(
                "train.compile",
                f"strategy.context = {self.context} gathers keys and values of other ranks within attention, which "
                "cannot be compiled",
                ('set train.compile = "off"', "or remove strategy.context"),
            )
        if self.experts > 1:
            from ddpforge.strategies.fsdp.expert_parallel import unsupported_experts

            yield from unsupported_experts(self.experts, self.grid, train, ranks, cpu_offload=self.cpu_offload)
        if self.all_gather_dtype == "compute" and train.precision == "fp32":
            yield Unsupported(
                "strategy.all_gather_dtype",
                'strategy.all_gather_dtype = "compute" has no effect while train.precision is "fp32"',
                ('set train.precision = "bf16", or remove strategy.all_gather_dtype',),
            )

    @property
    def splits_model(self) -> bool:
        """True if ranks share layers, sequences or experts."""
        return self.sharing.tensor > 1 or self.context > 1 or self.experts > 1

    def check(self, model: nn.Module, task: Task, blocks: Sequence[nn.Module]) -> None:
        """Raises UsageError or StrategyError if the model's layers, sequences or experts cannot be split as set."""
        self.sharing.check(model, task, blocks)
        if self.context > 1:
            from ddpforge.strategies.fsdp.context_parallel import check_context

            check_context(self.context, model, task)
        if self.experts > 1:
            from ddpforge.strategies.fsdp.expert_parallel import check_experts

            check_experts(self.experts, model)

    def data_ranks(self, ranks: int) -> int:
        """Returns the number of groups of ranks that see the same samples."""
        return self.grid.data_ranks(ranks)

    def check_data(self, data: Any) -> None:
        """Raises UsageError if sequences of the dataset's `block_size` cannot be cut."""
        self.sharing.check_data(data)
        if self.context > 1 and isinstance(length := getattr(data, "block_size", None), int):
            from ddpforge.strategies.fsdp.context_parallel import check_length

            check_length(length, self.context)

    def setup(self, train: TrainSection, world: World) -> World:
        """Forms the process groups of the grid."""
        from ddpforge.ranks.join import limit_waiting

        self.places = self.grid.places(world)
        self.mesh = self.places.mesh
        self._rounded: set[str] = set()  # weights that stay gathered after forward, in the dtype of train.precision
        limit_waiting(self.places.groups, train)
        if self.experts > 1:
            from ddpforge.strategies.fsdp.expert_parallel import ExpertParallel

            self.spread = ExpertParallel(world, self.experts)
            limit_waiting(self.spread.groups, train)
        return super().setup(train, replace(world, dp_ranks=self.places.data))

    def init_context(self) -> AbstractContextManager[Any]:
        """Returns the meta device if `meta` is set, to build the model without memory."""
        if not self.meta:
            return nullcontext()
        import torch

        self._random = torch.get_rng_state()  # initial weights are drawn later, from this state
        return torch.device("meta")

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Shards every block, then the rest of the model; parameters become DTensors with the same names."""
        if self.meta:
            import torch

            torch.set_rng_state(self._random)
        self.shares = self.sharing.attach(model, blocks, self.places.tensor, self.places.tensor_mesh, self.world)
        return self._shard_all(model, blocks)

    @property
    def layout(self) -> ShardLayout:
        """Returns the layout of the weights, which gives this rank's parts."""
        from ddpforge.strategies.fsdp.shards import ShardLayout

        held = self.shares or self.spread
        return ShardLayout(held.cuts if held else {}, self.places.tensor)

    def place_auxiliary(self, module: nn.Module, blocks: Sequence[nn.Module]) -> Weights:
        """Shards the auxiliary module like the model, separately from it."""
        from ddpforge.strategies.fsdp.shards import DTensorWeights

        if self.tensor > 1:
            raise StrategyError(
                f"the task uses {type(module).__name__} in addition to the model, but strategy.tensor = {self.tensor} "
                "splits only the model's layers",
                hints=["set strategy.tensor = 1, and shard it instead"],
            )
        # The rest outside of blocks must be freed after forward: no backward pass frees it.
        self._shard_all(module, blocks, reshard_after_forward=True)
        self.partial.add(module, f"the auxiliary {type(module).__name__.removeprefix('FSDP')}")
        return DTensorWeights(module, self.layout.part, self.partial)

    def _shard_all(
        self, model: nn.Module, blocks: Sequence[nn.Module], *, reshard_after_forward: bool | None = None
    ) -> nn.Module:
        from torch.distributed.fsdp import fully_shard

        from ddpforge.strategies.fsdp.context_parallel import ContextParallel
        from ddpforge.strategies.fsdp.wrap_units import (
            check_shardable,
            check_ties,
            materialise,
            mixed_precision_policy,
            reduce_dtype,
            tied_names,
        )

        for name, parameter in model.named_parameters():
            check_shardable(name, parameter)
            if not parameter.is_meta:  # shards are flat: `fully_shard` refuses other memory formats
                parameter.data = parameter.data.contiguous()
        if self.context > 1:
            ContextParallel(self.places.context).give(model)
        tied = tied_names(model)
        if self.meta:
            materialise(model, then={id(block): partial(self._shard_block, model) for block in blocks})
        else:
            for block in blocks:
                self._shard_block(model, block)
        # The rest (embeddings, the last norm) is gathered in fp32; autocast decides its compute dtype.
        self._agree_on(model)
        self._cut(model, model)
        fully_shard(
            model,
            mesh=self.mesh,
            reshard_after_forward=reshard_after_forward,
            mp_policy=mixed_precision_policy(None, reduce_dtype(model)),
            offload_policy=self._offload(),
        )
        check_ties(tied, model)
        return model

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Tests the optimizer on a small sharded weight, and checks that the model is sharded."""
        from ddpforge.strategies.composite_optimizer import member_optimizers
        from ddpforge.strategies.fsdp.context_parallel import ContextParallel, ContextReplica
        from ddpforge.strategies.fsdp.expert_parallel import ExpertReplica
        from ddpforge.strategies.fsdp.replica import FSDPReplica
        from ddpforge.strategies.fsdp.shards import try_on_shards
        from ddpforge.strategies.fsdp.wrap_units import check_sharded
        from ddpforge.strategies.parameter_guard import PartialWeights

        for _, member in member_optimizers(optimizer):
            try_on_shards(member, self.mesh, self.world.device)
            self.sharing.try_out(member, self.world.device)
        check_sharded(model)
        self.partial = PartialWeights(_WHOLE)
        self.partial.add(model, "the model")
        if self.train.compile == "off":  # else the hooks would break the graphs
            self.partial.hide(model, {*self.layout.cuts, *self._rounded})
        if self.context > 1:
            return ContextReplica(ContextParallel(self.places.context), self, model, optimizer)
        if self.spread:
            return ExpertReplica(self.spread, self, model, optimizer)
        return FSDPReplica(self, model, optimizer)

    def _shard_block(self, model: nn.Module, block: nn.Module) -> None:
        if self.all_gather_dtype == "compute" and self.world.device.type == "cpu":
            _reject_norms(block)
        self._agree_on(block)
        self._cut(model, block)
        if not self.reshard_after_forward and self._gather_dtype(block) is not None:
            own = {id(parameter) for parameter in block.parameters()}
            self._rounded |= {name for name, parameter in model.named_parameters() if id(parameter) in own}
        self._shard(block, self.mesh)

    def _shard(self, block: nn.Module, mesh: DeviceMesh) -> FSDPModule:
        from torch.distributed.fsdp import fully_shard

        from ddpforge.strategies.fsdp.wrap_units import mixed_precision_policy, reduce_dtype

        return fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=self.reshard_after_forward,
            mp_policy=mixed_precision_policy(self._gather_dtype(block), reduce_dtype(block)),
            offload_policy=self._offload(),
        )

    @property
    def gathers_exactly(self) -> bool:
        """True if all weights are gathered in their own dtype."""
        if self.all_gather_dtype is None:
            return self.train.precision != "bf16" or device_kind(self.world.device).is_host
        return self.all_gather_dtype == "fp32"

    def _gather_dtype(self, block: nn.Module) -> torch.dtype | None:
        """Returns the dtype in which a block's weights are gathered; None for their own."""
        from ddpforge.strategies.precision import precision_for

        if self.gathers_exactly:
            return None
        # The kernels of BatchNorm take weights only in the dtype of their running statistics.
        tracks = any(getattr(module, "running_mean", None) is not None for module in block.modules())
        if self.all_gather_dtype is None and tracks:
            return None
        return precision_for(self.train.precision, self.world.device).dtype

    def _cut(self, model: nn.Module, part: nn.Module) -> None:
        if self.shares:
            self.shares.cut(model, part)
        if self.spread:
            self.spread.take(model, part, partial(self._shard, mesh=self.spread.mesh))

    def _agree_on(self, module: nn.Module) -> None:
        """Broadcasts rank 0's values of tensors that are not sharded yet, as DDP does."""
        from torch.distributed.tensor import DTensor

        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.world.device)
                self.world.global_ranks.broadcast(tensor.data)

    def _offload(self) -> OffloadPolicy:
        from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

        return CPUOffloadPolicy() if self.cpu_offload else OffloadPolicy()


def _reject_norms(block: nn.Module) -> None:
    """Raises StrategyError if the weights of a norm would be rounded."""
    # CPU kernels need weights in the dtype of the normalised input; GPU kernels do not.
    from torch import nn

    for name, module in block.named_modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm) and module.weight is not None:
            raise StrategyError(
                f'strategy.all_gather_dtype = "compute" rounds the weights of `{name}`, a {type(module).__name__}, '
                "which torch supports on a GPU but not on a CPU",
                hints=["remove strategy.all_gather_dtype"],
            )
