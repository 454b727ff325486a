"""Interfaces of datasets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from ddpforge.errors import UsageError

__all__ = ["Data", "ShardedDataset", "class_names_of"]


@runtime_checkable
class Data(Protocol):
    """Map-style dataset: `len(data)` samples, fetched a batch at a time.

    `__len__` and `__getitem__` are enough: torch's `default_collate` then stacks the samples. Optional:

    - `__getitems__(ids: list[int])` fetches a whole batch at once; its result is the argument of `collate`.
    - `collate(samples)` makes a batch from the fetched samples; return the argument unchanged if it already is a batch.
      A batch may nest dicts, lists and tuples. Tensors, and objects with a method `to(device)`, are moved to the
      device.
    - `random = False`: fetching uses no random numbers, which saves seeding. Otherwise the RNGs of python, numpy and
      torch are seeded from (recipe seed, epoch, sample) before each sample, or from (recipe seed, epoch, first sample)
      before each `__getitems__`. If a sample may come more than once in an epoch (see `BatchSampler.once`), the step
      replaces the epoch in the seed.
    - `set_epoch(epoch: int)` is called before the first sample of each epoch is fetched, in loader processes too. In
      training, so is `set_step(step: int)` before the first sample of each step. The first step of the run is 0.
    - `forkable = True`: samples may be fetched in processes that are forked after samples were fetched. The dataset has
      no open file that such processes would share, nothing on a GPU, and nothing that training changes. ddpforge then
      chooses the number of loader processes itself if `data.workers = "auto"`.
    - `encode(text: str) -> list[int]` and `decode(tokens: list[int]) -> str`, in text for language models: used by
      `ddpforge generate` and to display samples.
    - `class_names: Sequence[str]`: the name of each class number, from 0. If the constructor has an option
      `class_names` that the recipe does not set, evaluation sets, further sources and prediction data get the names of
      the training data as this option, and number their classes by it. Other datasets are compared: a name that differs
      is an error.
    - Columns that a sampler reads by name, e.g. `labels` or `lengths`: an attribute or a method with an array of one
      value per sample. `train.max_tokens` reads the number of tokens of each sample from `lengths`.

    An iterable dataset is a `torch.utils.data.IterableDataset`, or has `__iter__` and no `__getitem__`. It must yield
    the same samples in the same order on every rank and in every loader process. ddpforge distributes them so that each
    sample is used once, and compares the samples that the ranks have read. An optional `set_epoch(epoch: int)` is
    called before each pass. The RNGs of python, numpy and torch are seeded from (recipe seed, epoch), the same on every
    rank, unless `random = False`. Do the expensive part of loading in `collate`, which receives only the samples of
    this rank. If the data has parts of known length, use `ShardedDataset`: not every rank then reads all of it.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class ShardedDataset(ABC):
    """Iterable dataset in parts of known length (files, shards, row groups), readable from any sample on.

    Each rank and loader process reads only the samples that it keeps. A resume opens the parts at the position of the
    run. The samples of a step are computed from `shard_sizes`, and do not depend on the number of ranks or loader
    processes. Optional, as for any data: `collate(samples)`, `random = False`, `classes` and the like. `iter_shard`
    must not use random numbers; `prepare` and `collate` may.
    """

    shard_sizes: Sequence[int]
    """Number of samples in each part."""

    shuffle: bool = False
    """Read the parts in a different order in every epoch."""

    shuffle_buffer: int = 1
    """Size of the shuffle buffer of each lane: number of neighboring samples that are read and shuffled together."""

    interleave: tuple[int, int] = (8, 4)
    """Number of positions (P, T) at which the data is read at the same time.

    Each epoch is cut into P × T lanes. A step takes its samples from P lanes; successive steps cycle through T groups
    of lanes. These numbers therefore influence which samples form a step. Each lane is read by a single process if the
    number of ranks times micro-batches per step divides P, and the number of loader processes divides T. Otherwise
    several processes share a lane and skip samples in it.
    """

    seekable: bool = True
    """True if opening a part in its middle is cheap. If False, skipped samples are read and dropped if possible."""

    @abstractmethod
    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[Any]:
        """Yields the samples of a part from number `skip` on; reads each sample only when it is requested."""

    def prepare(self, sample: Any) -> Any:
        """Converts a sample to the input of `collate`; decode and augment here.

        Called only for the samples that this process keeps. The RNGs are seeded from (recipe seed, epoch, sample)
        before each call.
        """
        return sample

    def __len__(self) -> int:
        return sum(self.shard_sizes)

    def __iter__(self) -> Iterator[Any]:
        for part in range(len(self.shard_sizes)):
            yield from self.iter_shard(part, epoch=0, skip=0)


def _names(value: Any) -> list[str]:
    """Returns names in the order of their numbers, from a list, an array or {number: name}; empty for other values."""
    if isinstance(value, Mapping):
        value = [value.get(number) for number in range(len(value))]
    elif hasattr(value, "tolist"):
        value = value.tolist()
    named = isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)
    return list(value) if named else []


def class_names_of(data: Any) -> list[str]:
    """Returns the names of a dataset's classes in the order of their numbers; empty if they are not known.

    They are its attribute `class_names`, or `classes` if this is a list of names, as in torchvision's datasets. A
    `Subset` or `ConcatDataset` of torch has the names of its datasets, a table of Hugging Face those of its only column
    of classes. Raises UsageError if the parts of a `ConcatDataset` have different names.
    """
    for value in (getattr(data, "class_names", None), getattr(data, "classes", None)):
        if found := _names(value):
            return found
    if isinstance(features := getattr(data, "features", None), Mapping):
        columns = [one.names for one in features.values() if isinstance(getattr(one, "names", None), list)]
        return list(columns[0]) if len(columns) == 1 else []
    of_torch = {one.__name__ for one in type(data).__mro__ if one.__module__ == "torch.utils.data.dataset"}
    if "Subset" in of_torch:
        return class_names_of(data.dataset)
    if "ConcatDataset" not in of_torch:
        return []
    first, *others = [found for part in data.datasets if (found := class_names_of(part))] or [[]]
    if other := next((found for found in others if found != first), None):
        raise UsageError(
            f"the parts of a {type(data).__name__} number their classes differently: {', '.join(first[:10])} and "
            f"{', '.join(other[:10])}",
            hints=["give each part as a source of its own: [data.train.NAME]", "or give all the same classes"],
        )
    return first
