"""Losses that compare the samples of a step with each other: whatever would break a step up is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from ddpforge.data import MicroBatch
from ddpforge.errors import UsageError
from ddpforge.interfaces import EpochOrder, Order, Refusal, Task
from ddpforge.recipe.schema import TrainSection
from ddpforge.training.first_look import name_of

__all__ = ["Even", "check_whole", "refusal_of_end", "refusal_of_order", "refusals_of_parts"]

_FEW = 100  # steps of an order whose sizes only it knows


def refusals_of_parts(task: Task, train: TrainSection, data_ranks: int) -> Iterator[Refusal]:
    """The settings under which a step is more than one forward pass on each of `data_ranks` ranks."""
    if not task.whole_batch:
        return
    why = f"{name_of(task)} compares all samples of a step with each other"
    if train.elastic_shards:
        yield Refusal(
            "train.elastic_shards", f"{why}, and `train.elastic_shards` would compute shards apart", ("leave it out",)
        )
    elif train.micro_batch and train.micro_batch * data_ranks < train.global_batch:
        yield Refusal(
            "train.micro_batch",
            f"{why}, and `train.micro_batch` = {train.micro_batch} would cut it into "
            f"{train.global_batch // (train.micro_batch * data_ranks)} forward passes of each rank",
            (f"leave it out: {train.global_batch // data_ranks} on each rank", "or train on more ranks"),
        )
    if train.eval_batch:
        yield Refusal(
            "train.eval_batch",
            f"{why}, {train.global_batch} at a time, and `train.eval_batch` would compare others at evaluation",
            ("leave it out: an evaluation is dealt to ranks in batches of train.global_batch samples at most",),
        )


def refusal_of_end(task: Task, key: str, smallest: int, data_ranks: int) -> Refusal | None:
    """The reason against data whose smallest batch, of `smallest` samples, leaves some rank without one."""
    if not task.whole_batch or smallest >= data_ranks:
        return None
    ways = ('set train.last_batch = "drop"', "or train on fewer ranks")
    return Refusal(
        key,
        f"{name_of(task)} compares all samples of a batch with each other, and one of [{key}] has {smallest} for "
        f"{data_ranks} ranks",
        ways if key == "data.train" else ways[1:],
    )


def refusal_of_order(task: Task, order: Order, global_batch: int, data_ranks: int, steps: int | None) -> Refusal | None:
    """The reason against an order whose first steps are not one forward pass of every rank each.

    Of a long run not all steps are looked at; `check_whole` looks at each when it comes.
    """
    for step in range(min(_FEW, steps or _FEW) if task.whole_batch else 0):
        if not data_ranks <= (size := len(order(step))) <= global_batch:
            return Refusal(
                "data.order",
                f"{name_of(task)} compares all samples of a step with each other, and step {step} of the order "
                f"{name_of(order)} has {size} for {data_ranks} ranks and forward passes of train.global_batch = "
                f"{global_batch}",
                ("let every step have a sample for each rank, and no more than train.global_batch",),
            )
    return None


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
