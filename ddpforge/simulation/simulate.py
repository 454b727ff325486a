"""Runs the steps of a recipe on fake tensors, with ddpforge's own assembling and its strategy: what one rank does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torch.utils.module_tracker import ModuleTracker

from ddpforge.data import MicroBatch, RankShare, open_data
from ddpforge.interfaces import World
from ddpforge.ranks import phases
from ddpforge.simulation.fake import fake_batch, fakes, pretended, without_memory
from ddpforge.simulation.ledger import Ledger, Living
from ddpforge.simulation.work import Work
from ddpforge.strategies.several import members
from ddpforge.training import assemble
from ddpforge.training.batchnorm import BatchNormAverager
from ddpforge.training.building import build_data_and_model
from ddpforge.training.foreseeing import foresee
from ddpforge.training.one_turn import of_turns
from ddpforge.training.optimizers import build_optimizer
from ddpforge.training.parts import Parts
from ddpforge.training.step import Stepper
from ddpforge.training.turns import Turns

__all__ = ["Simulated", "simulate"]

_MICRO_BATCHES = 2  # of a step: the memory of more is the same, and their work a multiple


@dataclass
class Simulated:
    """One rank's step, as it was counted. Bytes, of what lives at the largest moment."""

    rank: int
    peak: int
    phase: str  # in which the peak lies
    kinds: dict[str, int]
    largest: Sequence[Living] = ()
    work: Work = field(default_factory=Work)
    state: dict[str, int] = field(default_factory=dict)  # bytes of weights, gradients and optimizer state
    samples: int = 0  # of this rank in a micro-batch
    tokens: int = 0


def simulate(parts: Parts, ranks: int, *, rank: int = 0, largest: int = 10) -> Simulated:
    """Simulates optimizer steps of a recipe, of which nothing is built yet, as rank `rank` of `ranks` takes them.

    Two steps, for the optimizer makes its state in the first; what is counted is the second. Raises RecipeError for a
    recipe that cannot train, `Unsimulated` for what runs on real ranks only, and what torch raises for an operation
    that has no shapes without values.
    """
    foresee(parts, ranks=ranks, device="cpu")
    build_data_and_model(parts, meta=True)
    parts.report()
    with pretended(ranks, rank) as everyone:
        world = parts.strategy.setup(parts.recipe.train, everyone)
        first, batches = _batches(parts, world)
        with fakes() as mode, patch.object(assemble, "prove", _unproven):
            batches = [one._replace(data=fake_batch(one.data, mode)) for one in batches]
            return _Rank(parts, world, rank).simulate(first, batches, largest)


def _batches(parts: Parts, world: World) -> tuple[MicroBatch, list[MicroBatch]]:
    """The first micro-batches of this rank, of which the last is the step's last."""
    batch = parts.plan.batch
    opened = open_data(
        parts.data["train"],
        order=parts.order,
        global_batch=batch.global_batch,
        share=RankShare(world.data.rank, world.data.size, batch.micro_batch, parts.recipe.train.elastic_shards),
        drop_last=parts.recipe.train.last_batch == "drop",
        seed=parts.recipe.train.seed,
        workers=0,
        prefetch=2,
        pin=False,
    )
    some = list(islice(opened.training(0), min(batch.accumulation, _MICRO_BATCHES)))
    some[-1] = some[-1]._replace(last=True)
    return some[0], some


def _unproven(*_: Any) -> None:
    """Stands in for the proof that ranks hold the model once: there are no other ranks to ask."""


class _Counted(Stepper):
    """Takes the number of samples for that of items, which the values of a batch would tell."""

    def _count(self, first: MicroBatch, micro_batches: Any) -> tuple[list[MicroBatch], int]:
        return list(micro_batches), first.step_samples


class _Rank:
    """A rank with its part of the model; within `fakes`."""

    def __init__(self, parts: Parts, world: World, rank: int) -> None:
        self._parts, self._rank, self._world = parts, rank, world
        recipe = parts.recipe
        without_memory(parts.model)
        for beside in parts.beside.values():
            without_memory(beside.module)
        self._modules = ModuleTracker()
        self._phase = phases.START
        self._work = Work()
        self._ledger = Ledger(self._work, lambda: phases.NAMES[self._phase], self._module)
        model = assemble._spread(parts)
        self._model = model
        self._optimizer = build_optimizer(
            parts.registry, recipe.optimizer, model, list(parts.turns), recipe.train.blocks
        )
        self._replica = assemble._prepared(parts, world, model, self._optimizer)
        parts.task.start(self._replica.bare, world)
        steppers = {
            turn: _Counted(world, self._replica, one, part, BatchNormAverager(None), seed=0, skips=False)
            for (turn, one), (_, part) in zip(of_turns(parts.task).items(), members(self._optimizer), strict=True)
        }
        self._turns = Turns(self._replica, steppers, parts.turns)

    def simulate(self, first: MicroBatch, batches: Sequence[MicroBatch], largest: int) -> Simulated:
        ledger, work = self._ledger, self._work
        ledger.note((one for batch in batches for one in _tensors(batch.data)), "batch")
        self._note()
        marks: list[Work] = []

        def enter(phase: int) -> None:
            self._phase = phase
            if phase == phases.FORWARD:
                marks.append(work.copy())

        phases.follow(enter)
        try:
            with self._modules, ledger:
                self._step(1, first, batches)
                ledger.restart()
                work.operations.clear()
                work.sent.clear()
                marks.clear()
                self._step(2, first, batches)
        finally:
            phases.follow(None)
        self._note()
        repeated = marks[1] - marks[0] if len(marks) > 1 else Work()
        times = max(0, self._parts.plan.batch.accumulation - len(batches))
        alive = sorted(ledger.alive(), key=lambda piece: -piece.bytes)
        return Simulated(
            rank=self._rank,
            peak=ledger.peak,
            phase=ledger.peak_phase,
            kinds=ledger.by_kind(),
            largest=alive[:largest],
            work=work + repeated * times,
            samples=first.samples,
        )

    def _step(self, number: int, first: MicroBatch, batches: Sequence[MicroBatch]) -> None:
        draws = ((first, iter(batches)) for _ in range(self._turns.draws))
        self._replica.module.train()
        self._replica.on_gradient = lambda _: self._note()  # type: ignore[method-assign]
        self._turns.train(number, draws, measure=False)
        self._phase = phases.DATA
        self._note()

    def _note(self) -> None:
        """Says what the tensors are for that are known by name."""
        ledger, model = self._ledger, self._model
        parameters = list(model.parameters())
        ledger.note(parameters, "weights")
        ledger.note(model.buffers(), "buffers")
        ledger.note((p.grad for p in parameters if p.grad is not None), "gradients")
        for _, optimizer in members(self._optimizer):
            ledger.note((x for one in optimizer.state.values() for x in _tensors(one)), "optimizer state")

    def _module(self) -> str:
        names = self._modules.parents - {"Global"}
        return max(names, key=len).partition(".")[2] if names else ""


def _tensors(nest: Any) -> Iterator[Tensor]:
    from torch.utils._pytree import tree_iter

    return (one for one in tree_iter(nest) if isinstance(one, Tensor))
