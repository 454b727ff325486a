"""Lays the parts of a model over ranks, and chooses the schedules in which micro-batches go through them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from ddpforge.ranks.collectives import Connected
from ddpforge.strategies.pipeline.steps import Step
from ddpforge.strategies.tensor.options import Sharing
from ddpforge.strategies.tensor.shares import Shares

# What goes wrong is raised; before that, torch lists the plan of all ranks as an error of its own.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

__all__ = ["SCHEDULES", "Held", "Kind", "Layout", "schedule_for"]


@dataclass(frozen=True)
class Kind:
    """A schedule of torch's, and what it asks for."""

    make: Callable[..., Any]
    parts: int = 1  # of the model, on each rank
    returns: bool = False  # whether the last part is on the first rank
    splits_backward: bool = False


SCHEDULES: Mapping[str, Kind] = {
    "1F1B": Kind(Schedule1F1B),
    "GPipe": Kind(ScheduleGPipe),
    "Interleaved1F1B": Kind(ScheduleInterleaved1F1B, parts=2),
    "InterleavedZeroBubble": Kind(ScheduleInterleavedZeroBubble, parts=2, splits_backward=True),
    "ZBVZeroBubble": Kind(ScheduleZBVZeroBubble, parts=2, returns=True, splits_backward=True),
}


@dataclass(frozen=True)
class Layout:
    """The parts of a model over the `stages` ranks of a pipeline, of which this one is at place `here`."""

    here: int
    stages: int
    kind: Kind

    @property
    def parts(self) -> int:
        """The number of all parts."""
        return self.stages * self.kind.parts

    @property
    def mine(self) -> list[int]:
        """The numbers of those that are here."""
        return [part for part in range(self.parts) if self.place(part) == self.here]

    def place(self, part: int) -> int:
        """The place of the rank that has a part: once along the pipeline, and on from its start, or back."""
        round, along = divmod(part, self.stages)
        return self.stages - 1 - along if round and self.kind.returns else along

    def runs(self, micro_batches: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Cuts micro-batches as the schedule can take them: interleaved ones want rounds of equal length."""
        rest = len(micro_batches) % self.stages if self.kind.parts > 1 and not self.kind.returns else 0
        whole = len(micro_batches) - rest
        yield from filter(None, (micro_batches[:whole], micro_batches[whole:]))


@dataclass(frozen=True)
class Held:
    """A rank's share of a model, and what is to be known of the others'."""

    pipe: dist.ProcessGroup  # the ranks that the model is cut for, in the order of stages
    layout: Layout
    steps: Mapping[int, Sequence[Step]]  # by the numbers of the parts that this rank has
    names: Collection[str]  # of all tensors of the model, each under its first
    aliases: Mapping[str, str]
    holders: Mapping[str, Sequence[int]]  # of tensors that several ranks of the pipeline have: their places in it
    shared: Mapping[str, dist.ProcessGroup]  # of those that this rank has: the ranks that add up its gradient
    tensor: Connected  # the ranks that compute shares of the same layers
    sharing: Sharing
    shares: Shares | None  # where they are several
    split: Mapping[int, bool]  # by part: whether these ranks get activations of their own
    sharded: bool  # whether ranks that see different data hold shards of a stage's weights


def schedule_for(layout: Layout, stages: Sequence[PipelineStage], count: int, loss: Callable[..., Any]) -> Any:
    """A schedule for so many micro-batches; with fewer of them than stages, there is nothing to alternate."""
    if layout.kind.parts > 1:
        return layout.kind.make(list(stages), count, loss_fn=loss, scale_grads=False)
    make = ScheduleGPipe if count < layout.stages else layout.kind.make
    return make(stages[0], count, loss_fn=loss, scale_grads=False)
