"""Replica for a stage of a pipeline: its steps, and its state for checkpoints."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial as bound
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ddpforge import compat
from ddpforge.compat import tree_leaves, tree_map_only
from ddpforge.errors import StrategyError
from ddpforge.interfaces import (
    CanonicalState,
    Compute,
    MultiPassOptimizer,
    Pass,
    Region,
    SavedTensor,
    Strategy,
    TensorShard,
)
from ddpforge.ranks import heartbeat
from ddpforge.ranks.collectives import ProcessGroup
from ddpforge.strategies import named_state
from ddpforge.strategies.buffers import equalise_buffers
from ddpforge.strategies.fsdp.shards import DTensorWeights, clip_local, local, reshard, rows_of, shard_like, shard_of
from ddpforge.strategies.fsdp.wrap_units import GradientCoverage
from ddpforge.strategies.parameter_guard import PartialWeights, check_loss
from ddpforge.strategies.pipeline import stage
from ddpforge.strategies.pipeline.schedules import StageState, schedule_for
from ddpforge.strategies.pipeline.segments import Segment, held_by
from ddpforge.strategies.pipeline.stage import StageMicroBatch, StageOutput, call_signature
from ddpforge.strategies.tensor.tensor_parallel import TensorParallelGradients
from ddpforge.strategies.torch_replica import TorchReplica

__all__ = ["PipelineReplica"]

_MOST = 8  # schedules to keep, each with memory for its received tensors
_WHOLE = ("compute the number in the model's forward, and return it with the outputs", 'or set strategy.use = "ddp"')
_MARKS = 8  # more heartbeats than a rank sends for a micro-batch and one of its parts


class PipelineReplica(TorchReplica):
    """Replica with this rank's parts of the model; averages gradients over the ranks of the stage, once per step.

    If these ranks hold shards of the stage's weights, FSDP averages gradients after every backward pass.
    """

    # The model is FSDP's root module. Parts run as its forward pass, so that FSDP gathers weights outside of blocks.

    def __init__(
        self, strategy: Strategy, model: nn.Module, optimizer: Optimizer, held: StageState, elsewhere: Collection[str]
    ) -> None:
        self._held, self._layout, self._group = held, held.layout, held.pipe
        self._data = strategy.world.dp_ranks
        self._partial = PartialWeights(_WHOLE)
        self._partial.add(model, "the model")
        self._partial.hide(model, dict(model.named_parameters()))  # shards stay gathered after the part's forward
        super().__init__(strategy, model, optimizer, _Weights(model, self.part, self._partial, held.names))
        self._pipe = ProcessGroup(held.pipe, strategy.world.device)
        device = strategy.world.device
        self._parts = {
            number: stage.StageModule(
                number,
                held.layout.parts,
                steps,
                _tensors(model, steps),
                elsewhere,
                device,
                bound(self._begin, number),
                lambda: self.forward(),
                self._through if held.sharded else _directly,
            )
            for number, steps in held.steps.items()
        }
        self.computes_loss = held.layout.parts - 1 in self._parts
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._forms: dict[Any, Any] = {}
        names = {self.gradients.names[id(p)]: p for p in self.gradients.trained}
        self._counted = {name: p for name, p in names.items() if self._places(name)[0] == held.layout.here}
        self._shared: TensorParallelGradients | None = None
        if shares := held.shares:
            self._shared = TensorParallelGradients(held.tensor, cut=shares.cuts, summed=shares.summed)
        self._used = GradientCoverage(model) if held.sharded else None
        model.forward = _take_part

    # -- one step
    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs all passes of a step together; in an evaluation, as many passes together as fill the pipeline.

        Passes with inputs of different forms run one form after the other. The rank with the last part yields the
        results; other ranks yield None.
        """
        self._compute = compute
        source = iter(passes)
        while ones := list(source if trains else islice(source, 2 * self._layout.parts)):
            micros = [self._micro(one) for one in ones]
            if self._held.sharded and self._data.size > 1:
                self._join_forms(micros)
            for form in dict.fromkeys(micro.form for micro in micros):
                for run in self._layout.runs([micro for micro in micros if micro.form == form]):
                    self._run(run, trains=trains)
            for micro in micros:
                yield micro.result

    def _join_forms(self, micros: Sequence[StageMicroBatch]) -> None:
        """Makes ranks that hold shards of one stage run their micro-batches in the same groups."""
        # They gather weights together, so all of them must do the extra passes for a form that is new to one rank.
        of_ranks = self._data.all_gather_object([micro.form for micro in micros])
        for micro, *forms in zip(micros, *of_ranks, strict=True):
            micro.form = tuple(forms)

    def _begin(self, part: int) -> None:
        if self._held.shares:
            self._held.shares.begin(split=self._held.split[part] and self.unwrapped.training)

    def _through(self, steps: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return self.unwrapped(_Steps(steps), *args, **named)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the autocast context; with sharded weights it keeps no copies of gathered ones."""
        if self._held.sharded:
            return self.precision.sharded_forward(compiled=self.train.compile != "off")
        return super().autocast()

    def _micro(self, one: Pass) -> StageMicroBatch:
        with self.forward(), self._partial.refused():
            return call_signature(one, self._compute)

    def _run(self, micros: Sequence[StageMicroBatch], *, trains: bool) -> None:
        """Runs forward, and if `trains` backward, of micro-batches of one form."""
        marks = heartbeat.current().beats
        self._micros = micros
        for part in self._parts.values():
            part.micros = micros
        with self._held.sharing.losses():
            if trains:
                self._train(micros)
            else:
                self._evaluate(micros)
        # The rank with the last part sends more heartbeats than others.
        heartbeat.reset_beats(marks + _MARKS * self._layout.kind.parts * (len(micros) + 1))

    def _train(self, micros: Sequence[StageMicroBatch]) -> None:
        places = range(len(micros))
        has_first, has_last = 0 in self._parts, self._layout.parts - 1 in self._parts
        try:
            self._schedule(len(micros), micros[0].form).step(
                arg_mbs=[(torch.zeros(()),)] * len(micros) if has_first else None,
                kwarg_mbs=[{"number": place} for place in places],
                target_mbs=[torch.tensor(place) for place in places] if has_last else None,
                return_outputs=False,
            )
        except RuntimeError as error:
            if isinstance(error.__cause__, Exception):  # torch wraps the error of a part
                raise error.__cause__ from None
            raise

    def _schedule(self, count: int, form: Any) -> Any:
        """Returns the schedule for `count` micro-batches of a form; its first step infers shapes of sent tensors."""
        key = count, form
        if key not in self._schedules:
            depth, device = self._layout.parts, self.world.device
            stages = [PipelineStage(part, n, depth, device, group=self._group) for n, part in self._parts.items()]
            self._schedules[key] = schedule_for(self._layout, stages, count, self._loss)
            if len(self._schedules) > _MOST:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _loss(self, _: Tensor, place: Tensor) -> Tensor:
        """Returns the loss of a micro-batch; the schedule calls it after the last part."""
        micro = self._micros[int(place)]
        outputs = [x for x in tree_leaves(micro.output) if isinstance(x, Tensor) and x.requires_grad]
        if outputs and compat.finds_shapes():
            # torch infers shapes with uninitialized activations. The task must not receive them: it may store them.
            loss = torch.stack([_local(x.sum()).float() for x in outputs]).sum()
            micro.output = None
            return loss
        loss = self._finish(micro)
        check_loss(loss)
        return loss * micro.one.scale()

    def _finish(self, micro: StageMicroBatch) -> Tensor:
        """Calls the task to compute the loss; stores it and the task's outputs without their graph."""
        with self.forward(), self._partial.refused():
            loss, outputs = self._compute(StageOutput(micro.output), micro.one)
        loss = _local(loss)
        micro.output = None
        micro.result = loss.detach(), tree_map_only(Tensor, Tensor.detach, outputs)
        return loss

    # -- without gradients
    def _evaluate(self, micros: Sequence[StageMicroBatch]) -> None:
        """Runs all `micros` through each part; a rank with two parts sends only after it received everything."""
        at_once = self._layout.kind.parts == 1
        sent: list[tuple[dist.Work | None, Tensor]] = []
        kept: dict[int, tuple[Tensor, ...]] = {}
        for number, part in self._parts.items():
            later: list[tuple[Tensor, ...]] = []
            for place, micro in enumerate(micros):
                x = kept.pop(place, None) or (self._receive(number, micro.form) if number else ())
                found = part(*x, number=place)
                found = found if isinstance(found, tuple) else (found,)
                if part.last:
                    self._finish(micro)
                elif number + 1 in self._parts:
                    kept[place] = found
                elif at_once:
                    sent += self._send(number + 1, micro.form, found)
                else:
                    later.append(found)
            for found in later:
                sent += self._send(number + 1, micros[0].form, found)
        for work, _ in sent:
            if work is not None:
                work.wait()

    def _send(self, part: int, form: Any, tensors: Sequence[Tensor]) -> Iterator[tuple[dist.Work | None, Tensor]]:
        """Starts to send tensors; before the first of a form it sends their shapes and dtypes."""
        to = self._layout.place(part)
        if (part, form) not in self._forms:
            self._forms[part, form] = [(x.shape, x.dtype) for x in tensors]
            dist.send_object_list([self._forms[part, form]], group=self._group, group_dst=to, device=self.world.device)
        for x in tensors:
            x = x.contiguous()
            yield dist.isend(x, group=self._group, group_dst=to), x

    def _receive(self, part: int, form: Any) -> tuple[Tensor, ...]:
        source = self._layout.place(part - 1)
        if (part, form) not in self._forms:
            box: list[Any] = [None]
            dist.recv_object_list(box, group=self._group, group_src=source, device=self.world.device)
            (self._forms[part, form],) = box
        found = tuple(
            torch.empty(shape, dtype=dtype, device=self.world.device) for shape, dtype in self._forms[part, form]
        )
        for x in found:
            dist.recv(x, group=self._group, group_src=source)
        return found

    # -- the update
    def step(self) -> Tensor:
        """Sums gradients over the ranks with the same weights, averages over data ranks, clips and updates."""
        self._exchange()
        return super().step()

    def perturb(self, optimizer: MultiPassOptimizer) -> Tensor:
        """Reduces gradients over ranks, then explores."""
        self._exchange()
        return super().perturb(optimizer)

    def _exchange(self) -> None:
        self._reject_unused()
        mine = self._local(self.gradients.trained)
        if self._shared:
            self._shared.add_up(mine)
        for name, gradient in mine.items():  # in the model's order, which is the same on all ranks
            if group := self._held.shared.get(name):
                dist.all_reduce(gradient, group=group)
        if self._data.size == 1 or self._held.sharded:
            return
        for dtype in dict.fromkeys(gradient.dtype for gradient in mine.values()):
            gradients = [gradient for gradient in mine.values() if gradient.dtype == dtype]
            flat = (
                self._data.all_reduce_sum(torch.cat([gradient.reshape(-1) for gradient in gradients])) / self._data.size
            )
            pieces = torch.split(flat, [gradient.numel() for gradient in gradients])
            compat.foreach("copy_", gradients, [x.view_as(g) for x, g in zip(pieces, gradients, strict=True)])

    def _reject_unused(self) -> None:
        self.gradients.collect()
        if self._used is None:
            return
        trained, names = self.gradients.trained, self.gradients.names
        if not self._used.all_of(len(trained)):  # FSDP fills missing gradients with zeros
            self.gradients.check_unused([p for p in trained if names[id(p)] not in self._used])
        self._used.clear()

    def _local(self, parameters: Iterable[Tensor]) -> dict[str, Tensor]:
        """Returns this rank's gradients of parameters, by name, as plain tensors."""
        found = {self.gradients.names[id(p)]: p.grad for p in parameters if p.grad is not None}
        return dict(zip(found, local(found.values()), strict=True))

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """Returns the norm over all stages; a weight on several stages counts once."""
        # This takes one all-reduce of a number, another with tensor parallelism, and another with shards.
        mine = self._local(self._counted.values())
        if self._shared:
            square = self._shared.square(mine) + 0  # the addition waits for the all-reduce
        else:
            square = torch.nn.utils.get_total_norm(list(mine.values())).to(self.world.device).square()
        if self._held.sharded:
            square = self._data.all_reduce_sum(square) + 0
        return self._pipe.all_reduce_sum(square).sqrt()

    def held(self, gradients: Iterable[Tensor]) -> list[Tensor]:
        """Returns this rank's shards of the gradients, or whole gradients without shards."""
        return local(gradients)

    def clip(self, largest: float, norm: Tensor) -> None:
        """Scales this rank's gradients."""
        clip_local(self.gradients.trained, largest, norm)

    def sync_buffers(self) -> None:
        """Makes buffers equal on the ranks of a stage."""
        equalise_buffers(self.unwrapped, self._data)

    # -- to disk and back
    def _places(self, name: str) -> Sequence[int]:
        """Returns the places in the pipeline of the ranks that hold a tensor."""
        return self._held.holders.get(name, (self._layout.here,))

    def part(self, name: str, tensor: Tensor) -> TensorShard:
        """Returns this rank's part of a tensor that is distributed like the parameter or buffer `name`."""
        places, own, sharded = self._places(name), self._held.tensor, isinstance(tensor, DTensor)
        replica, replicas = places.index(self._layout.here), len(places)
        if not sharded:
            replica, replicas = replica * self._data.size + self._data.rank, replicas * self._data.size
        among = str(places) if len(places) > 1 else ""
        (mine,) = local([tensor])
        if self._held.shares and (cut := self._held.shares.cuts.get(name)):
            rows = rows_of(tensor) if isinstance(tensor, DTensor) else (0, len(tensor))
            return TensorShard(mine, cut.shape, cut.region(*rows), replica, replicas, among)
        replica, replicas = replica * own.size + own.rank, replicas * own.size
        return replace(shard_of(tensor), replica=replica, replicas=replicas, replica_group=among)

    def state(self) -> CanonicalState[Tensor | TensorShard]:
        """Returns the state of this rank's parts."""
        reshard(self.unwrapped)
        state = named_state.capture(self.unwrapped, self.optimizer)
        return CanonicalState(
            model={name: self.part(name, cast(Tensor, tensor)) for name, tensor in state.model.items()},
            optimizer={
                name: {
                    key: self.part(name, value) if isinstance(value, Tensor) and value.ndim else value
                    for key, value in entry.items()
                }
                for name, entry in state.optimizer.items()
            },
            aliases=self._held.aliases,
            extra_state=self.remembered(),
            scalars=self.precision.state(),
        )

    def load_state(self, state: CanonicalState[SavedTensor], *, partial: bool = False) -> None:
        """Reads the state of this rank's parts."""
        reshard(self.unwrapped)
        mine, _ = named_state.tensors(self.unwrapped)
        others = self._held.names - mine.keys()

        def here(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in others}

        mine_of = replace(state, model=here(state.model), optimizer=here(state.optimizer))
        named_state.restore(
            self.unwrapped, self.optimizer, mine_of, partial=partial, part_of=self.part, like=shard_like
        )
        self.remember(state)


class _Weights(DTensorWeights):
    """Weights of a rank's parts."""

    def __init__(
        self,
        model: nn.Module,
        part_of: Callable[[str, Tensor], TensorShard],
        partial: PartialWeights,
        names: Collection[str],
    ) -> None:
        super().__init__(model, part_of, partial)
        self._elsewhere = set(names) - dict(model.named_parameters()).keys()

    def remote_names(self) -> Collection[str]:
        return self._elsewhere

    def elements(self, name: str, region: Region) -> Tensor:
        if name in self._elsewhere:
            raise ValueError(f"`{name}` is on another rank of the pipeline")
        return super().elements(name, region)


def _tensors(model: nn.Module, steps: Sequence[Segment]) -> list[Tensor]:
    """Returns the tensors that the steps of a part use, each once."""
    return list({id(tensor): tensor for step in steps for tensor in held_by(model, step)}.values())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class _Steps:
    """Argument that makes the model take these steps as its forward pass."""

    take: Callable[..., Any]


def _directly(steps: Callable[..., Any], *args: Any, **named: Any) -> Any:
    return steps(*args, **named)


def _take_part(*args: Any, **named: Any) -> Any:
    """Replaces the model's forward pass: takes the steps in `_Steps`; raises StrategyError for any other call."""
    if args and isinstance(args[0], _Steps):
        return args[0].take(*args[1:], **named)
    raise StrategyError(
        "a callback or the task calls the model itself, but no rank of a pipeline has the whole model",
        hints=[
            "remove that callback; callbacks with `calls_model = True` are refused before training",
            'or set strategy.use = "fsdp"',
        ],
    )
