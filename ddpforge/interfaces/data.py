"""Datasets, from which models learn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

__all__ = ["Data", "PartedData"]


@runtime_checkable
class Data(Protocol):
    """A map-style dataset: `len(data)` samples, fetched a batch at a time.

    A dataset with `__getitem__` alone works too: its samples are stacked by torch's `default_collate`. Optional:

    - `__getitems__(ids: list[int])` fetches a whole batch at once (what it returns goes to `collate`);
    - `collate(samples)` makes a batch out of what was fetched; return it unchanged when it already is one. It is a nest
      of dicts, lists and tuples; tensors go to the device, and objects with a method `to(device)` go by that;
    - `random = False` says that fetching draws no random numbers, which saves seeding per sample. Otherwise
      python's, numpy's and torch's generators are seeded from (recipe seed, epoch, sample) before each sample, or
      from (recipe seed, epoch, first sample) before each `__getitems__`; where a sample may come more than once in an
      epoch (see `BatchSampler.once`) the step takes the epoch's place;
    - `set_epoch(epoch: int)` is called before the first sample of each epoch is fetched, and in training
      `set_step(step: int)` before the first of each step (0 for the first of the run), in loader processes too;
    - `forkable = True` says that samples may be fetched in processes that are forked from one that has fetched some: it
      holds no open file that they would share, nothing on a GPU, and nothing that training changes. Then loader
      processes may be started by themselves (`data.workers = "auto"`);
    - `encode(text: str) -> list[int]` and `decode(tokens: list[int]) -> str`, of text for language models, say what
      tokens a text is: for `ddpforge generate`, and for people who look at samples;
    - what an order of training data asks for by name, such as `labels` or `lengths`: an attribute, or a method, that is
      an array with one value per sample.

    An iterable dataset is a `torch.utils.data.IterableDataset`, or has `__iter__` and no `__getitem__`. It must yield
    the same samples in the same order on every rank and in every worker; ddpforge deals them out so that each is used
    once, and compares what ranks have read. Its `set_epoch(epoch: int)`, if it has one, is called before each pass,
    and python's, numpy's and torch's generators are seeded from (recipe seed, epoch), the same everywhere; `random =
    False` saves that. Do the expensive part of loading in `collate`, which sees only the samples that this rank keeps.
    Data in parts of known length need not be read by all: see `PartedData`.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


class PartedData(ABC):
    """An iterable dataset in parts of known length (files, shards, row groups), each of which can be entered anywhere.

    Each rank and loader process reads only what it keeps, and a resume enters the parts where the run stood.
    Which samples form a step is arithmetic on `parts`, whatever the number of ranks and loader processes. Optional, as
    for any data: `collate(samples)`, `random = False`, `classes` and the like. Reading must not draw random numbers;
    `prepare` and `collate` may.
    """

    parts: Sequence[int]
    """The number of samples in each part."""

    shuffle: bool = False
    """Read the parts in another order in every epoch."""

    shuffle_buffer: int = 1
    """Samples that are read ahead, in each lane, and taken in random order."""

    interleave: tuple[int, int] = (8, 4)
    """The number of places at which the data is read at once: by so many in every step, and by so many in turn.

    Part of what decides which samples form a step. Where ranks times micro-batches of a step divide the first, and
    loader processes the second, each lane is one process's alone; otherwise several share one, and jump.
    """

    jumps: bool = True
    """Opening a part in its middle costs next to nothing. Otherwise what is not needed is read over where possible."""

    @abstractmethod
    def open(self, part: int, *, epoch: int, skip: int) -> Iterator[Any]:
        """The samples of a part, from number `skip` on; read only when asked for."""

    def prepare(self, sample: Any) -> Any:
        """A sample as `collate` takes it, called for those that are kept: the place to decode, and to augment.

        Generators of random numbers are seeded from (recipe seed, epoch, sample) before each.
        """
        return sample

    def __len__(self) -> int:
        return sum(self.parts)

    def __iter__(self) -> Iterator[Any]:
        for part in range(len(self.parts)):
            yield from self.open(part, epoch=0, skip=0)
