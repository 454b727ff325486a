"""Simulates the steps of a recipe on one rank with fake tensors, by ddpforge's own assembly and strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from tempfile import gettempdir
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_iter

from ddpforge.api import (
    Built,
    MicroBatch,
    RankShare,
    build_optimizer,
    find_blocks,
    open_data,
    tasks_by_update,
)
from ddpforge.data.collating import BatchKeys
from ddpforge.features.alternating_updates import AlternatingUpdates
from ddpforge.features.memory_tracker import LOSS, LiveTensor, MemoryTracker
from ddpforge.features.multi_pass import MultiPass
from ddpforge.interfaces import Replica, RunContext, Task, Tracker, World
from ddpforge.ranks import heartbeat
from ddpforge.strategies import torch_replica
from ddpforge.strategies.composite_optimizer import AlternatingOptimizer, member_optimizers
from ddpforge.strategies.deepspeed import replica as zero_replica
from ddpforge.strategies.fsdp import strategy as fsdp
from ddpforge.tools.simulation.devices import Work
from ddpforge.tools.simulation.fake import Post, fake_batch, fake_mode, fake_world, without_memory
from ddpforge.training import assemble
from ddpforge.training.callbacks import overriding
from ddpforge.training.features import GlobalBatch, TakesSteps
from ddpforge.training.media import MediaLogger
from ddpforge.training.step import Stepper

__all__ = ["Simulated", "simulate"]

_STATE = ("weights", "master weights", "gradients", "optimizer state", "buffers")
_MICRO_BATCHES = 2  # simulated in a step: more take the same memory and a multiple of the work


@dataclass
class Simulated:
    """Simulated step of one rank: bytes of the live tensors at the peak, and of the permanent state."""

    peak: int
    phase: str  # of the peak
    kinds: dict[str, int]
    largest: Sequence[LiveTensor] = ()
    work: Work = field(default_factory=Work)
    state: dict[str, int] = field(default_factory=dict)  # weights, gradients, optimizer state, buffers
    all_flops: int = 0  # of all ranks together
    model_flops: int = 0  # the same, without attention's scores that are computed again
    whole: int = 0  # bytes of the model's weights, on all ranks together
    items: float = 0.0  # in the sum of a micro-batch's loss

    def stage_shapes(self, fewer: Simulated, times: float) -> Simulated:
        """Extrapolates to more micro-batches: adds `times` times the difference to a step with fewer."""

        def grown(now: int, before: int) -> int:
            return now + int((now - before) * times)

        return replace(
            self,
            peak=grown(self.peak, fewer.peak),
            kinds={name: grown(size, fewer.kinds.get(name, 0)) for name, size in self.kinds.items()},
            state={name: grown(size, fewer.state.get(name, 0)) for name, size in self.state.items()},
            work=self.work + (self.work - fewer.work) * times,
        )


def simulate(
    parts: Built,
    ranks: int,
    *,
    rank: int = 0,
    largest: int = 10,
    micro_batches: int | None = None,
    post: Post | None = None,
) -> Simulated:
    """Simulates an optimizer step on `rank`; the model of `parts` is built without memory.

    The optimizer's state is made before: from empty gradients, or in a step that is not counted.

    Args:
        largest: number of the largest live tensors to return.
        micro_batches: number of micro-batches in the step; by default all.
        post: shapes that pipeline stages have sent in earlier simulations, see `fakes`.

    Raises RecipeError if the recipe cannot train, `NotSimulatable` for a feature that needs real ranks, and torch's
    error if the shapes of an operation depend on values.
    """
    with fake_world(ranks, rank) as everyone:
        world = parts.strategy.setup(parts.recipe.train, everyone)
        first, batches = _batches(parts, world, micro_batches)
        whole = sum(p.numel() * p.element_size() for p in parts.model.parameters())
        counted = parts.task.count(first.data)
        items = float(first.samples if counted is None else counted)
        with (
            fake_mode(post) as mode,
            patch.object(assemble, "verify_contract", _nothing),
            patch.object(torch_replica, "guarded_forward", _unwatched),
            patch.object(zero_replica, "guarded_forward", _unwatched),
            patch.object(fsdp, "_reject_norms", _nothing),  # for CPUs, and the plan may be for GPUs
        ):
            batches = [one._replace(data=fake_batch(one.data, mode)) for one in batches]
            found = _Rank(parts, world).simulate(first, batches, largest)
        return replace(found, items=items, whole=whole)


def _batches(parts: Built, world: World, most: int | None) -> tuple[MicroBatch, list[MicroBatch]]:
    """Returns the first micro-batch of this rank, and the first few; the last of these is marked as the step's last."""
    batch = parts.plan.batch
    opened = open_data(
        parts.data["train"],
        order=parts.sampler,
        global_batch=batch.global_batch,
        share=RankShare(world.dp_ranks.rank, world.dp_ranks.size, batch.micro_batch, parts.recipe.train.virtual_ranks),
        drop_last=parts.recipe.train.drop_last,
        seed=parts.recipe.train.seed,
        workers=0,
        prefetch=2,
        pin=False,
        keys=BatchKeys.of(parts.recipe.data),
        limit=parts.limit,
    )
    if parts.strategy.simulation.micro_batches(world.global_ranks.size) is None:
        most = _MICRO_BATCHES
    some = list(islice(opened.training(0), min(batch.accumulation, most or batch.accumulation)))
    some[-1] = some[-1]._replace(last=True)
    return some[0], some


def _nothing(*_: Any) -> None:
    """Replaces checks of other ranks and of this machine, because the plan is for other machines."""


def _unwatched(*_: Any, **__: Any) -> AbstractContextManager[None]:
    """Replaces the watch over a first forward pass, which finds mistakes in a model."""
    return nullcontext()


class _Seen:
    """Task that passes the outputs of a loss to `seen`; everything else is that of `task`."""

    def __init__(self, task: Task, seen: Callable[[Any], None]) -> None:
        self._task, self._seen = task, seen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Returns the task's loss and outputs."""
        loss, outputs = self._task.loss(model, batch)
        self._seen(outputs)
        return loss, outputs


class _Counted(Stepper):
    """Stepper that passes outputs to `seen`, and counts samples as items: the values of a batch are unknown."""

    seen: Any = staticmethod(lambda outputs: None)

    def __init__(self, world: World, replica: Replica, task: Task, update: Any, **options: Any) -> None:
        super().__init__(world, replica, cast(Task, _Seen(task, lambda outputs: self.seen(outputs))), update, **options)

    def count_items(self, first: MicroBatch, micro_batches: Any) -> tuple[list[MicroBatch], int]:
        return list(micro_batches), first.step_samples


class _Rank:
    """Rank with its part of the model; used in `fakes`."""

    def __init__(self, parts: Built, world: World) -> None:
        self._parts, self._world = parts, world
        recipe = parts.recipe
        without_memory(parts.model)
        for beside in parts.auxiliary.values():
            without_memory(beside.module)
        self._modules: list[str] = []  # modules in their forward pass, the innermost last
        self._phase = heartbeat.START
        self._work = Work()
        self._ledger = MemoryTracker(lambda: heartbeat.NAMES[self._phase], self._module, self._work.add)
        with self._ledger:
            self._model = model = assemble._spread(parts)
            self._optimizer = build_optimizer(
                parts.registry, recipe.optimizer, model, list(parts.updates), recipe.train.blocks
            )
            self._replica = assemble._prepared(parts, world, model, self._optimizer)
            self._place_others()
        own = self._optimizer.parts if isinstance(self._optimizer, AlternatingOptimizer) else {"": self._optimizer}
        several_passes = MultiPass(self._replica)
        several_passes.start(self._replica.unwrapped)
        steppers = {
            update: _Counted(world, self._replica, one, several_passes.around_update(own[update]), seed=0)
            for update, one in tasks_by_update(parts.task).items()
        }
        for stepper in steppers.values():
            stepper.seen = lambda outputs: self._ledger.note(_tensors(outputs), LOSS)
        self._batch: GlobalBatch  # of the current step; all of its updates take the same
        self._stepper: TakesSteps = steppers.get("") or AlternatingUpdates(
            self._replica, steppers, parts.updates, lambda: self._batch
        )

    def _place_others(self) -> None:
        """Places the auxiliary modules of the task, and the weights that callbacks keep."""
        parts, world, replica = self._parts, self._world, self._replica
        for beside in parts.auxiliary.values():
            parts.strategy.place_auxiliary(beside.module, find_blocks(beside.module, ()))
        run = RunContext(
            model=replica.unwrapped,
            world=world,
            weights=replica.weights,
            folder=Path(gettempdir()),
            forward=replica.forward,
            log_media=MediaLogger(Tracker(), is_rank_zero=False),
            gradients=replica.gradients_by_name,
        )
        parts.task.start(replica.unwrapped, world)
        for name in overriding(parts.callbacks, "evaluating"):
            parts.callbacks[name].on_start(run)

    def simulate(self, first: MicroBatch, batches: Sequence[MicroBatch], largest: int) -> Simulated:
        ledger, work = self._ledger, self._work
        ledger.note((one for batch in batches for one in _tensors(batch.data)), "batch")
        self._note()
        marks: list[Work] = []

        def enter(phase: int) -> None:
            self._phase = phase
            if phase == heartbeat.FORWARD:
                marks.append(work.copy())
            if phase == heartbeat.STEP:
                self._name_gradients()

        heartbeat.follow(enter)
        try:
            with self._naming(), ledger:
                self._make_state(batches)
                ledger.restart()
                work.operations.clear()
                work.sent.clear()
                marks.clear()
                with self._shapes_known():
                    self._step(2, first, batches)
        finally:
            heartbeat.follow(None)
        self._note()
        alive = sorted(ledger.alive(), key=lambda piece: -piece.bytes)
        return Simulated(
            peak=ledger.peak,
            phase=ledger.peak_phase,
            kinds=ledger.by_kind(),
            largest=alive[:largest],
            work=self._whole_step(work, marks, len(batches)),
            state=self._state,
        )

    def _make_state(self, batches: Sequence[MicroBatch]) -> None:
        """Makes the optimizer's state: from empty gradients if that is enough, else in a whole step."""
        replica, optimizer = self._replica, self._optimizer
        if (
            isinstance(replica, torch_replica.TorchReplica)
            and replica.gradients.complete
            and not replica.gradients.stay  # else a step must place them
            and getattr(self._parts.strategy, "tensor", 1) == 1  # its first pass sends more than later ones
            and getattr(optimizer, "passes", 1) == 1
            and self._parts.recipe.train.precision != "fp16"  # its loss scale is made in a backward pass
        ):
            for parameter in replica.gradients.trained:
                parameter.grad = torch.empty_like(parameter)
            optimizer.step()
            replica.gradients.clear()
        else:  # one micro-batch is enough, but a pipeline fixes their number in its first step
            self._step(1, batches[-1], batches[-1:] if self._one_by_one else batches)

    @contextmanager
    def _shapes_known(self) -> Iterator[None]:
        """Excludes the work of pipeline stages in their first step only: they exchange the shapes of tensors."""

        def uncounted(prepare: Callable[..., Any]) -> Callable[..., Any]:
            def prepared(*args: Any, **kwargs: Any) -> Any:
                before = self._work.copy()
                found = prepare(*args, **kwargs)
                self._work.operations, self._work.sent = before.operations, before.sent
                self._ledger.restart()
                return found

            return prepared

        names = ("_prepare_forward_infra", "_prepare_backward_infra")
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(PipelineStage, name, uncounted(getattr(PipelineStage, name))))
            yield

    @property
    def _one_by_one(self) -> bool:
        """True if micro-batches are computed one after the other, on this rank alone."""
        return self._parts.strategy.simulation.micro_batches(self._world.global_ranks.size) is None

    def _whole_step(self, work: Work, marks: Sequence[Work], micro_batches: int) -> Work:
        """Returns the work of all micro-batches, although only some were simulated."""
        further = self._parts.plan.batch.accumulation - micro_batches
        return work + (marks[1] - marks[0]) * further if further and self._one_by_one else work

    def _step(self, number: int, first: MicroBatch, batches: Sequence[MicroBatch]) -> None:
        self._batch = first, batches
        self._replica.module.train()
        self._replica.on_gradient = lambda _: self._note()
        self._stepper.train_step(number, *self._batch, measure=False)
        self._phase = heartbeat.DATA
        self._note()

    def _note(self) -> None:
        """Labels the tensors in the ledger by their purpose."""
        ledger, model = self._ledger, self._model
        parameters = list(model.parameters())
        ledger.note(parameters, "weights")
        held = (part.tensor for part in self._replica.weights.shards().values())
        ledger.note((x for x in held if ledger.kind_of(x) != "weights"), "master weights")
        ledger.note((x for p in parameters for x in _tensors(vars(p)) if x is not p.grad), "weights")
        ledger.note(model.buffers(), "buffers")
        ledger.note((p.grad for p in parameters if p.grad is not None), "gradients")
        for _, optimizer in member_optimizers(self._optimizer):
            ledger.note((x for one in optimizer.state.values() for x in _tensors(one)), "optimizer state")

    def _name_gradients(self) -> None:
        """Labels the tensors that are left after the backward passes as gradients, and sums up the state."""
        self._note()
        for piece in self._ledger.living():
            if piece.kind == "backward":
                piece.kind = "gradients"
        self._state = dict.fromkeys(_STATE, 0)
        for piece in self._ledger.living():
            if piece.kind in self._state:
                self._state[piece.kind] += piece.bytes

    def _module(self) -> str:
        return self._modules[-1] if self._modules else ""

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Tracks the modules with a running forward pass."""
        names = {id(module): name for name, module in self._model.named_modules()}

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(names.get(id(module), ""))

        def leave(*_: Any) -> None:
            self._modules.pop()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _tensors(nest: Any) -> Iterator[Tensor]:
    return (one for one in tree_iter(nest) if isinstance(one, Tensor))
