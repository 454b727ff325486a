"""Cuts a model into parts for the ranks of one or several pipelines, which see different data."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

from pydantic import Field

from ddpforge import compat
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Contract, Replica, Simulation, Strategy, Task, Unsupported, World
from ddpforge.strategies.ddp import DDP
from ddpforge.strategies.fsdp.mesh import ParallelDims, divisions
from ddpforge.strategies.tensor.options import LossParallel, Sequenced, Styles, Tensored, TensorParallelOptions

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ddpforge.ranks.collectives import CollectiveRanks
    from ddpforge.recipe.schema import TrainSection
    from ddpforge.strategies.pipeline.segments import Segment
    from ddpforge.strategies.tensor.tensor_parallel import TensorParallel

__all__ = ["Pipeline"]

Schedule = Literal["1F1B", "GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble"]


class Pipeline(Strategy):
    """torch.distributed.pipelining: the model's steps in stages on different ranks; micro-batches flow through them.

    The ranks form `stages` stages. If there are more ranks, each stage is on several ranks, which see different data.
    They average their gradients, or hold shards of the stage's weights with `data = "fsdp"`. With `tensor`,
    neighbouring ranks compute shares of their stage's layers, according to a plan. The schedule's micro-batches are
    those of gradient accumulation.

    Huang et al., "GPipe" (2019); Narayanan et al., "Efficient Large-Scale Language Model Training" (2021); Qi et al.,
    "Zero Bubble Pipeline Parallelism" (2024).
    """

    contract = Contract(
        shards=("weights", "gradients", "optimizer state"),
        clipping="identically on every rank, after the all-reduce, by the norm over all stages",
        accumulation="autograd, in the parameters' .grad, in the order of the schedule; one all-reduce per step",
        reads_gradients=True,
        callable=False,
        loss_in_model=False,
        splits_forward=("steps",),
    )

    def __init__(
        self,
        *,
        stages: Annotated[
            int | None,
            Field(ge=2, le=2**12, description="Number of stages into which the model is cut; by default all ranks."),
        ] = None,
        schedule: Annotated[
            Schedule,
            Field(
                description="Order of forward and backward passes. All but the first two give each rank two parts of"
                " the model. ZeroBubble schedules compute gradients of weights while a rank would wait."
            ),
        ] = "1F1B",
        split_points: Annotated[
            Sequence[str],
            Field(
                max_length=2**13,
                description='First step of each part after the first part, e.g. ["blocks.6"]; by default parts cost'
                " about the same.",
            ),
        ] = (),
        data: Annotated[
            Literal["ddp", "fsdp"],
            Field(
                description='Weights on ranks of one stage, which see different data: all of them ("ddp"), or shards,'
                ' gathered block by block, with a reduce-scatter of gradients in every micro-batch ("fsdp").'
            ),
        ] = "ddp",
        tensor: Tensored = 1,
        plan: Styles = None,
        sequence_parallel: Sequenced = False,
        loss_parallel: LossParallel = False,
    ) -> None:
        self.stages, self.schedule, self.split_points, self.tensor = stages, schedule, split_points, tensor
        self._ranks = 0  # 0: not known yet
        self.sharded = data == "fsdp"
        if self.sharded:
            self.contract = replace(
                self.contract,
                clipping="identically on every rank, after the reduce-scatter, by the norm over all shards",
                accumulation="the shards' .grad; one reduce-scatter per micro-batch",
            )
        if tensor > 1:
            self.contract = replace(self.contract, splits_forward=("layers", "steps"))
        self.sharing = TensorParallelOptions(
            tensor=tensor, plan=plan, sequence=sequence_parallel, loss_parallel=loss_parallel
        )

    # -- before the loop
    @classmethod
    def layouts(cls, ranks: int) -> Iterator[Mapping[str, Any]]:
        """Yields each schedule on all numbers of stages and of ranks that share layers, with each kind of replicas."""
        for sizes in divisions(ranks, "stages", "tensor"):
            groups = ranks // prod(sizes.values())
            if "stages" in sizes:
                for schedule, data in product(get_args(Schedule), ("ddp", "fsdp") if groups > 1 else ("ddp",)):
                    yield sizes | {"schedule": schedule} | ({"data": data} if data != "ddp" else {})

    @property
    def splits_model(self) -> bool:
        """Returns True: the model is always cut into stages."""
        return True

    def for_evaluation(self, ranks: int) -> tuple[Strategy, str]:
        """Returns DDP if the ranks cannot form the pipeline, and the reason."""
        # A whole model may fit on each rank, because an evaluation has no gradients.
        if any(self._unsupported_ranks(ranks)):
            there = f"{ranks} rank{'s' * (ranks > 1)}"
            return DDP(), f'{there} cannot form the pipeline: each holds the whole model, as under strategy.use = "ddp"'
        return self, ""

    def data_ranks(self, ranks: int) -> int:
        """Returns the number of pipelines."""
        groups = ranks // self.tensor
        return max(1, groups // (self.stages or max(1, groups)))

    @property
    def simulation(self) -> Simulation:
        """Returns a simulation of one rank of every stage."""
        return StageSimulation(self)

    def stages_of(self, ranks: int) -> int:
        """Returns the number of stages."""
        return self.stages or max(1, ranks // self.tensor)

    def steps_of_stages(self, model: nn.Module, ranks: int) -> list[Sequence[Segment]]:
        """Returns the steps of each stage; only for schedules with one part per rank."""
        from ddpforge.strategies.pipeline.segments import declared_segments

        steps, stages = declared_segments(model), self.stages_of(ranks)
        begins = self._begins(model, steps, stages)
        return [steps[begins[part] : begins[part] + _size(begins, part, len(steps))] for part in range(stages)]

    def unsupported(self, train: TrainSection, ranks: int, device: str) -> Iterator[Unsupported]:
        """Refuses a number of ranks that cannot form the pipeline, and options that do not work in one."""
        self._promise(self.data_ranks(ranks))  # the contract is shown before `setup`
        self._ranks = ranks
        yield from self._unsupported_ranks(ranks)
        yield from self.sharing.unsupported(train)
        if not compat.has_pipelines():
            import torch

            least = compat.PIPELINES
            message = f"pipelines need torch {least} or newer, but this is torch {torch.__version__}"
            hints = (f"pip install 'torch>={least}'", 'or set strategy.use = "fsdp"')
            yield Unsupported("strategy.use", message, hints)
        if train.precision == "fp16":
            yield Unsupported(
                "train.precision",
                'train.precision = "fp16" adapts the loss scale to overflows, which not all ranks of a pipeline '
                "would detect",
                ('set train.precision = "bf16" or "fp32"',),
            )
        if train.sync_batchnorm:
            yield Unsupported(
                "train.sync_batchnorm",
                "train.sync_batchnorm waits for all ranks, but only some ranks of a pipeline compute a layer",
                ("remove train.sync_batchnorm",),
            )
        yield from self._unsupported_blocks(train)

    def _promise(self, data_ranks: int) -> None:
        self.contract = replace(self.contract, replicas=1 if self.sharded else data_ranks)

    def _unsupported_ranks(self, ranks: int) -> Iterator[Unsupported]:
        if ranks % self.tensor:
            yield from ParallelDims(tensor=self.tensor).unsupported(ranks)
            return
        groups, stages = ranks // self.tensor, self.stages or 2
        if groups < 2 or (self.stages and groups % stages):
            there = f"{ranks} rank{'s' * (ranks > 1)}"
            yield Unsupported(
                "strategy.stages",
                f"{there} cannot form a pipeline of {self.stages or '2 or more'} stages"
                + (f" of {self.tensor} ranks that share layers" if self.tensor > 1 else ""),
                (f"ddpforge launch RECIPE --nproc {stages * self.tensor}, or a multiple", "or another strategy.use"),
            )

    def _unsupported_blocks(self, train: TrainSection) -> Iterator[Unsupported]:
        from ddpforge.strategies.pipeline.schedules import SCHEDULES

        splits = SCHEDULES[self.schedule].splits_backward
        if self.sharded and splits:
            yield Unsupported(
                "strategy.data",
                f'strategy.schedule = "{self.schedule}" computes gradients of weights in a separate pass, '
                'for which strategy.data = "fsdp" does not gather weights',
                ('set strategy.schedule = "1F1B" or "Interleaved1F1B"', 'or strategy.data = "ddp"'),
            )
        if train.compile != "off" and self.tensor == 1 and (splits or not train.compile_blocks):
            yield Unsupported(
                "train.compile",
                f'strategy.schedule = "{self.schedule}" splits backward passes, but compiled code cannot be split'
                if splits
                else "no rank of a pipeline has the whole model, so it cannot be compiled",
                ('set strategy.schedule = "1F1B"' if splits else "set train.compile_blocks = true",),
            )
        for key, twice in (("activation_checkpointing", "recomputed"), ("activation_offload", "copied")):
            if not (getattr(train, key) and splits):
                continue
            yield Unsupported(
                f"train.{key}",
                f'strategy.schedule = "{self.schedule}" splits backward passes: activations would be {twice} '
                "for both parts",
                ('set strategy.schedule = "1F1B" or "Interleaved1F1B"',),
            )

    def check(self, model: nn.Module, task: Task, blocks: Sequence[nn.Module]) -> None:
        """Raises UsageError or StrategyError unless the model declares its steps and can be cut as the recipe sets."""
        from ddpforge.strategies.pipeline.schedules import SCHEDULES
        from ddpforge.strategies.pipeline.segments import cut_where, declared_segments

        steps = declared_segments(model)
        if self._ranks and not any(self._unsupported_ranks(self._ranks)):
            self._begins(model, steps, self.stages_of(self._ranks) * SCHEDULES[self.schedule].parts)
        elif self.split_points:
            cut_where(steps, self.split_points, len(self.split_points) + 1)
        self.sharing.check(model, task, blocks)

    def check_data(self, data: Any) -> None:
        """Raises UsageError if sequences of the dataset's `block_size` cannot be cut."""
        self.sharing.check_data(data)

    def setup(self, train: TrainSection, world: World) -> World:
        """Forms process groups: ranks = stages × data × tensor; ranks of one stage are neighbours."""
        from torch.distributed.device_mesh import init_device_mesh

        from ddpforge.ranks.collectives import ProcessGroup, SingleRank
        from ddpforge.ranks.join import limit_waiting

        data = self.data_ranks(world.global_ranks.size)
        sizes = {"stage": world.global_ranks.size // (data * self.tensor), "data": data, "tensor": self.tensor}
        kept = {name: size for name, size in sizes.items() if size > 1 or name != "tensor"}
        mesh = init_device_mesh(world.device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
        limit_waiting(mesh.get_all_groups(), train)
        self.pipe: dist.ProcessGroup = mesh.get_group("stage")
        self.grid: list[list[int]] = mesh.mesh.flatten(1).tolist()  # the ranks of each stage
        self._promise(data)
        self.data_mesh = mesh["data"]

        def alike(name: str) -> CollectiveRanks:
            return ProcessGroup(mesh.get_group(name), world.device) if sizes[name] > 1 else SingleRank(world.device)

        self.sharers, self.sharers_mesh = alike("tensor"), mesh["tensor"] if self.tensor > 1 else None
        return super().setup(train, replace(world, dp_ranks=alike("data")))

    def wrap(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Keeps the tensors of this rank's steps; moves all others to the meta device."""
        import torch.distributed as dist

        from ddpforge.strategies import named_state
        from ddpforge.strategies.pipeline.schedules import SCHEDULES, StageLayout, StageState
        from ddpforge.strategies.pipeline.segments import declared_segments, held_by

        steps = declared_segments(model)
        if self.train.virtual_ranks and any(isinstance(module, compat.batch_norms()) for module in model.modules()):
            raise StrategyError(
                "train.virtual_ranks keeps statistics of BatchNorm for one virtual rank after the other, but a "
                "pipeline computes several at the same time",
                hints=["remove train.virtual_ranks, or normalise with GroupNorm or LayerNorm"],
            )
        shares = self.sharing.attach(model, blocks, self.sharers, self.sharers_mesh, self.world)
        layout = StageLayout(dist.get_rank(self.pipe), len(self.grid), SCHEDULES[self.schedule])
        begins = self._begins(model, steps, layout.parts)
        places = [layout.place(part) for part in range(layout.parts) for _ in range(_size(begins, part, len(steps)))]
        holders: dict[int, set[int]] = {}
        for place, step in zip(places, steps, strict=True):
            for tensor in held_by(model, step):
                holders.setdefault(id(tensor), set()).add(place)
        found, aliases = named_state.tensors(model)
        first = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # by the first of their names
        alike = {name: sorted(holders[id(t)]) for name, t in first.items() if len(holders[id(t)]) > 1}
        mine = {part: steps[begins[part] : begins[part] + _size(begins, part, len(steps))] for part in layout.mine}
        self.held = StageState(
            pipe=self.pipe,
            layout=layout,
            steps=mine,
            names=set(found),
            aliases=aliases,
            holders=alike,
            shared=self._groups(alike, layout.here),
            tensor=self.sharers,
            sharing=self.sharing,
            shares=shares,
            split={
                part: shares is not None and shares.splits_behind(_used(model, steps[: begins[part]])) for part in mine
            },
            sharded=self.sharded,
        )
        self._keep(model, {key for key, those in holders.items() if layout.here in those}, shares)
        self._reject_idle(model)
        if self.sharded:
            self._shard(model, blocks)
        return model

    def _begins(self, model: nn.Module, steps: Sequence[Segment], parts: int) -> list[int]:
        """Returns the number of the first step of each part."""
        from ddpforge.strategies.pipeline.segments import cut_evenly, cut_where

        return cut_where(steps, self.split_points, parts) if self.split_points else cut_evenly(model, steps, parts)

    def _shard(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Shards this rank's blocks, then the rest of its part of the model."""
        from torch.distributed.fsdp import fully_shard

        from ddpforge.strategies.fsdp.wrap_units import (
            check_shardable,
            check_ties,
            mixed_precision_policy,
            reduce_dtype,
            tied_names,
        )

        away = {parameter for parameter in model.parameters() if parameter.is_meta}
        for name, parameter in model.named_parameters():
            if parameter not in away:
                check_shardable(name, parameter)
                parameter.data = parameter.data.contiguous()
        tied = tied_names(model)
        for block in blocks:
            if away.isdisjoint(block.parameters()):
                fully_shard(block, mesh=self.data_mesh, mp_policy=mixed_precision_policy(None, reduce_dtype(block)))
        fully_shard(
            model, mesh=self.data_mesh, mp_policy=mixed_precision_policy(None, reduce_dtype(model)), ignored_params=away
        )
        check_ties(tied, model)

    def _keep(self, model: nn.Module, mine: set[int], shares: TensorParallel | None) -> None:
        """Broadcasts rank 0's values and keeps this rank's tensors, or its shares; moves others to the meta device."""
        import torch
        from torch import nn

        away: dict[int, Tensor] = {}
        cuts = (
            {id(p): shares.cuts[name] for name, p in model.named_parameters() if name in shares.cuts} if shares else {}
        )
        for tensor in (*model.parameters(), *model.buffers()):
            value = tensor.data.to(self.world.device)
            self.world.global_ranks.broadcast(value)
            if id(tensor) in mine:
                tensor.data = cuts[id(tensor)].take(value) if id(tensor) in cuts else value
            else:
                empty = torch.empty_like(tensor, device="meta")
                trains = tensor.requires_grad
                away[id(tensor)] = nn.Parameter(empty, trains) if isinstance(tensor, nn.Parameter) else empty
        for module in model.modules():
            for name, held in list(_own(module)):
                if id(held) in away:
                    setattr(module, name, away[id(held)])

    def _reject_idle(self, model: nn.Module) -> None:
        """Raises StrategyError if a rank has no parameter to train."""
        # An optimizer without weights would have no state of the step.
        trains = any(parameter.requires_grad and not parameter.is_meta for parameter in model.parameters())
        everyone = self.world.global_ranks.all_gather_object(trains)
        for rank, found in enumerate(everyone):
            if not found:
                raise StrategyError(
                    f"rank {rank} would have nothing to train: the steps of its stage have no trainable parameters",
                    hints=["cut elsewhere with strategy.split_points, use fewer stages, or freeze fewer parameters"],
                )

    def _groups(self, alike: Mapping[str, Sequence[int]], here: int) -> dict[str, dist.ProcessGroup]:
        """Returns the group of ranks of this pipeline that hold a tensor, by its name; all ranks form all groups."""
        import torch.distributed as dist

        from ddpforge.ranks.join import limit_waiting

        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        for places in dict.fromkeys(tuple(those) for those in alike.values()):
            for column in range(len(self.grid[0])):
                group = dist.new_group([self.grid[place][column] for place in places])
                if here in places and self.grid[here][column] == self.world.global_ranks.rank:
                    limit_waiting([cast(dist.ProcessGroup, group)], self.train)
                    made[places] = cast(dist.ProcessGroup, group)
        return {name: made[tuple(places)] for name, places in alike.items() if here in places}

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> Replica:
        """Removes other ranks' tensors and modules from the model, and returns the replica."""
        from ddpforge.strategies.fsdp.shards import try_on_shards
        from ddpforge.strategies.fsdp.wrap_units import check_sharded
        from ddpforge.strategies.optimizer_probe import check_independent_updates, check_sparse_gradients
        from ddpforge.strategies.pipeline.replica import PipelineReplica
        from ddpforge.strategies.pipeline.segments import named_tensors

        check_sparse_gradients(optimizer, model, sharded=True)
        check_independent_updates(optimizer, self.world.device)
        self.sharing.try_out(optimizer, self.world.device)
        if self.sharded:
            try_on_shards(optimizer, self.data_mesh, self.world.device)
        elsewhere = {word for name, t in named_tensors(model) if t.is_meta for word in name.split(".")}
        _remove(model)
        if self.sharded:
            check_sharded(model)
        return PipelineReplica(self, model, optimizer, self.held, elsewhere)


class StageSimulation(Simulation):
    """Simulation of a pipeline, with one rank for each stage."""

    def __init__(self, strategy: Pipeline) -> None:
        self._strategy = strategy

    def ranks_to_simulate(self, ranks: int, model: nn.Module, blocks: Sequence[nn.Module]) -> Mapping[int, Hashable]:
        """Returns the first rank of every stage and a key of its layers; with several parts per rank, keys differ."""
        # Of two stages with equal layers, the later one has at most as many micro-batches in flight.
        from ddpforge.strategies.pipeline.schedules import SCHEDULES
        from ddpforge.strategies.pipeline.segments import segment_signatures

        pipeline = self._strategy
        first = range(0, ranks, max(1, ranks // pipeline.stages_of(ranks)))
        if SCHEDULES[pipeline.schedule].parts > 1:
            return {rank: rank for rank in first}
        styles = pipeline.sharing.styles(model, blocks)
        return dict(zip(first, segment_signatures(model, pipeline.steps_of_stages(model, ranks), styles), strict=True))

    def micro_batches(self, ranks: int) -> tuple[int, int]:
        """Returns two numbers of micro-batches at which every rank alternates forward and backward passes.

        With two parts per rank, they are whole rounds.
        """
        from ddpforge.strategies.pipeline.schedules import SCHEDULES

        stages = self._strategy.stages_of(ranks)
        return (stages + 1, stages + 2) if SCHEDULES[self._strategy.schedule].parts == 1 else (3 * stages, 4 * stages)


def _size(begins: Sequence[int], part: int, steps: int) -> int:
    return [*begins, steps][part + 1] - begins[part]


def _used(model: nn.Module, steps: Sequence[Segment]) -> Iterator[str]:
    """Yields the names of all modules that the steps use, in their order."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for step in steps:
        for used in step.uses:
            yield from (name for name in names if name == used or name.startswith(f"{used}."))


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of one module under all of their names."""
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


def _remove(module: nn.Module) -> None:
    """Removes all tensors on the meta device, and modules with no other tensors."""
    for name, tensor in list(_own(module)):
        if tensor.is_meta:
            delattr(module, name)
    for name, child in list(module.named_children()):
        held = [*child.parameters(), *child.buffers()]
        if held and all(tensor.is_meta for tensor in held):
            delattr(module, name)
        else:
            _remove(child)
