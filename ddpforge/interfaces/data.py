"""Datasets, from which models learn."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

__all__ = ["Data"]


@runtime_checkable
class Data(Protocol):
    """A map-style dataset: `len(data)` samples, fetched a batch at a time.

    A dataset with `__getitem__` alone works too: its samples are stacked by torch's `default_collate`. Optional:

    - `__getitems__(ids: list[int])` fetches a whole batch at once (what it returns goes to `collate`);
    - `collate(samples)` makes a batch out of what was fetched; return it unchanged when it already is one;
    - `random = False` says that fetching draws no random numbers, which saves seeding per sample. Otherwise
      python's, numpy's and torch's generators are seeded from (recipe seed, epoch, sample) before each sample, or
      from (recipe seed, epoch, first sample) before each `__getitems__`; where a sample may come more than once in an
      epoch (see `Order.once`) the step takes the epoch's place;
    - `set_epoch(epoch: int)` is called before the first sample of each epoch is fetched, and in training
      `set_step(step: int)` before the first of each step (0 for the first of the run), in loader processes too;
    - what an order of training data asks for by name, such as `labels` or `lengths`: an attribute, or a method, that is
      an array with one value per sample.

    An iterable dataset is a `torch.utils.data.IterableDataset`, or has `__iter__` and no `__getitem__`. It must yield
    the same samples in the same order on every rank and in every worker; ddpforge deals them out so that each is used
    once, and compares what ranks have read. Its `set_epoch(epoch: int)`, if it has one, is called before each pass,
    and python's, numpy's and torch's generators are seeded from (recipe seed, epoch), the same everywhere; `random =
    False` saves that. Do the expensive part of loading in `collate`, which sees only the samples that this rank keeps.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...
