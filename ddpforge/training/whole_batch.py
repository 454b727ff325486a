"""Losses that compare the samples of a step with each other: whatever would break a step up is refused."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from ddpforge.data import MicroBatch
from ddpforge.errors import UsageError
from ddpforge.interfaces import EpochOrder, Task
from ddpforge.training.task_checks import name_of

__all__ = ["Even", "check_whole"]


def check_whole(task: Task, micro: MicroBatch) -> None:
    """Raises UsageError for a micro-batch that is not this rank's whole part, as streams and orders may give."""
    if task.whole_batch and (micro.samples == 0 or micro.number or not micro.last):
        raise UsageError(
            f"{name_of(task)} compares all samples of a batch with each other, and one of {micro.step_samples} samples "
            "is not one forward pass of every rank",
            hints=['set train.last_batch = "drop", or let the order give every step train.global_batch samples'],
        )


class Even(EpochOrder):
    """Every sample once, in the order of the data, in batches of nearly the same size and of `global_batch` at most.

    So an evaluation compares the same samples with each other on any number of ranks, and leaves none for a small end.
    """

    once = True

    def __init__(self, data: Any, global_batch: int) -> None:
        super().__init__(len(data), global_batch=global_batch, drop_last=False)

    @property
    def smallest(self) -> int:
        """The number of samples in the smallest batch."""
        return self.places // self.steps_per_epoch

    def size(self, step: int) -> int:
        """The number of samples in a batch."""
        first, end = (edge * self.places // self.steps_per_epoch for edge in (step, step + 1))
        return end - first

    def ids(self, steps: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The samples at the given places within the given batches."""
        found: NDArray[Any] = steps.astype("int64") * self.places // self.steps_per_epoch + places.astype("int64")
        return found

    def at(self, epochs: NDArray[Any], places: NDArray[Any]) -> NDArray[Any]:
        """The places themselves."""
        return places
