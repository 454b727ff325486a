"""Assigns the parts of a model to ranks, and chooses the schedule of micro-batches."""

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

from ddpforge.ranks.collectives import CollectiveRanks
from ddpforge.strategies.pipeline.segments import Segment
from ddpforge.strategies.tensor.options import TensorParallelOptions
from ddpforge.strategies.tensor.tensor_parallel import TensorParallel

# Errors are raised anyway; torch also logs the plan of all ranks as an error before.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)

__all__ = ["SCHEDULES", "ScheduleKind", "StageLayout", "StageState", "schedule_for"]


@dataclass(frozen=True)
class ScheduleKind:
    """Schedule of torch, and its requirements."""

    make: Callable[..., Any]
    parts: int = 1  # parts of the model on each rank
    returns: bool = False  # True if the last part is on the first rank
    splits_backward: bool = False


SCHEDULES: Mapping[str, ScheduleKind] = {
    "1F1B": ScheduleKind(Schedule1F1B),
    "GPipe": ScheduleKind(ScheduleGPipe),
    "Interleaved1F1B": ScheduleKind(ScheduleInterleaved1F1B, parts=2),
    "InterleavedZeroBubble": ScheduleKind(ScheduleInterleavedZeroBubble, parts=2, splits_backward=True),
    "ZBVZeroBubble": ScheduleKind(ScheduleZBVZeroBubble, parts=2, returns=True, splits_backward=True),
}


@dataclass(frozen=True)
class StageLayout:
    """Assignment of a model's parts to the `stages` ranks of a pipeline; this rank is at place `here`."""

    here: int
    stages: int
    kind: ScheduleKind

    @property
    def parts(self) -> int:
        """Returns the number of all parts."""
        return self.stages * self.kind.parts

    @property
    def mine(self) -> list[int]:
        """Returns the numbers of this rank's parts."""
        return [part for part in range(self.parts) if self.place(part) == self.here]

    def place(self, part: int) -> int:
        """Returns the place of the rank that has a part."""
        # The first parts go along the pipeline. Further parts begin at its start again, or go back from its end.
        round, along = divmod(part, self.stages)
        return self.stages - 1 - along if round and self.kind.returns else along

    def runs(self, micro_batches: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Yields groups of micro-batches for one run of the schedule each."""
        # Interleaved schedules need a multiple of the number of stages.
        rest = len(micro_batches) % self.stages if self.kind.parts > 1 and not self.kind.returns else 0
        whole = len(micro_batches) - rest
        yield from filter(None, (micro_batches[:whole], micro_batches[whole:]))


@dataclass(frozen=True)
class StageState:
    """A rank's share of a model, and data about other ranks' shares."""

    pipe: dist.ProcessGroup  # the ranks of the pipeline, in the order of stages
    layout: StageLayout
    steps: Mapping[int, Sequence[Segment]]  # this rank's steps, by number of the part
    names: Collection[str]  # first names of all tensors of the model
    aliases: Mapping[str, str]
    holders: Mapping[str, Sequence[int]]  # for tensors on several ranks of the pipeline: the places of these ranks
    shared: Mapping[str, dist.ProcessGroup]  # for such tensors on this rank: the ranks that sum its gradient
    tensor: CollectiveRanks  # the ranks that compute shares of the same layers
    sharing: TensorParallelOptions
    shares: TensorParallel | None  # None without tensor parallelism
    split: Mapping[int, bool]  # by part: True if activations that enter it are split over the `tensor` ranks
    sharded: bool  # True if ranks that see different data hold shards of a stage's weights


def schedule_for(layout: StageLayout, stages: Sequence[PipelineStage], count: int, loss: Callable[..., Any]) -> Any:
    """Returns a schedule for `count` micro-batches; GPipe if they are fewer than stages, instead of 1F1B."""
    if layout.kind.parts > 1:
        return layout.kind.make(list(stages), count, loss_fn=loss, scale_grads=False)
    make = ScheduleGPipe if count < layout.stages else layout.kind.make
    return make(stages[0], count, loss_fn=loss, scale_grads=False)
