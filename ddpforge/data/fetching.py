"""Fetches samples, in this process or in loader processes, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpforge.data.batch_assignment import AssignmentTerms, BatchAssigner, MicroBatch, Request
from ddpforge.data.collating import WHOLE_BATCH, BatchKeys, collate_of
from ddpforge.data.pytree import pinned
from ddpforge.data.rng import seed_all
from ddpforge.data.workers import explained, lacks_resources, refuse_missing_resources, reporting_context, starting
from ddpforge.errors import ForgeError, SetupError
from ddpforge.interfaces import BatchSampler, mix
from ddpforge.ranks.signals import leave_stopping_to_the_rank

__all__ = ["Batches", "Reader", "fetch_some", "is_stream"]

Reader: TypeAlias = "Callable[[Any, AssignmentTerms, BatchSampler | None, int, bool], IterableDataset[MicroBatch]]"
"""Returns this rank's micro-batches of a dataset, from its terms, its order if it has one, and the first step.

If the last argument is True, they end with the epoch, and have places as in an evaluation. The result is iterated in
this process, or in each loader process, which must yield every n-th micro-batch of n processes.
"""


def is_stream(data: Any) -> bool:
    """True for an iterable dataset."""
    # torch's base class of iterable datasets has a `__getitem__` too, but it only raises.
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))


class _Fetcher(Dataset[MicroBatch]):
    """Dataset with whole micro-batches as items; runs in the training process or in a loader process.

    Calls `set_epoch` of the inner dataset before the first sample of each epoch. With `tells_steps` (in training), also
    calls `set_step` before the first sample of each step.
    """

    def __init__(self, data: Any, seed: int, *, once: bool, tells_steps: bool, keys: BatchKeys = WHOLE_BATCH) -> None:
        self.data = data
        self.seed = seed
        self.random: bool = getattr(data, "random", True)
        self.once = once
        self.batched = hasattr(data, "__getitems__")
        self.collate = collate_of(data, keys)
        self._set_epoch = getattr(data, "set_epoch", None)
        self._set_step = getattr(data, "set_step", None) if tells_steps else None
        self._tells_places = not tells_steps or getattr(data, "keeps_places", False)  # of a feature's dataset
        self._epoch: int | None = None
        self._step: int | None = None

    def __getitem__(self, request: Request) -> MicroBatch:
        if self._set_epoch and request.epoch != self._epoch:
            self._set_epoch(request.epoch)
            self._epoch = request.epoch
        if self._set_step and request.step != self._step:
            self._set_step(request.step)
            self._step = request.step
        turn = request.epoch if self.once else request.step
        earlier = request.earlier or [0] * len(request.ids)
        if self.batched:
            if self.random:
                self._seed(turn, request.ids[0], earlier[0])
            fetched = self.data.__getitems__(request.ids)
        else:
            fetched = [self._sample(turn, *one) for one in zip(request.ids, earlier, strict=True)]
        _, _, _, samples, step_samples, last, shard, number, _ = request
        places = np.array(request.ids) if self._tells_places else None
        return MicroBatch(self.collate(fetched), samples, step_samples, last, shard, number, places=places)

    def _seed(self, turn: int, index: int, earlier: int) -> None:
        """Seeds the RNGs for a sample, which comes `earlier` times before in the step: each time it differs."""
        seed_all(mix(self.seed, turn, index, *([earlier] if earlier else [])))

    def _sample(self, turn: int, index: int, earlier: int) -> Any:
        if self.random:
            self._seed(turn, index, earlier)
        try:
            return self.data[index]
        except ForgeError:
            raise
        except Exception as error:
            error.add_note(f"while the dataset {type(self.data).__name__} gave sample {index}")
            raise


class _Told(Dataset[Any]):
    """Dataset in a loader process that returns expected errors instead of raising them.

    An error raised in a loader process would arrive as a traceback.
    """

    def __init__(self, inner: Dataset[MicroBatch]) -> None:
        self.inner = inner

    def __getitem__(self, request: Request) -> MicroBatch | ForgeError:
        try:
            return self.inner[request]
        except ForgeError as error:
            return error


class _ToldStream(IterableDataset[Any]):
    """Iterable dataset in a loader process that returns expected errors instead of raising them."""

    def __init__(self, inner: IterableDataset[MicroBatch]) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[MicroBatch | ForgeError]:
        try:
            yield from self.inner
        except ForgeError as error:
            yield error


class _Loaded(Iterable[MicroBatch]):
    """Micro-batches from loader processes; raises the errors that the processes return.

    Raises SetupError if no micro-batch comes for `patience` seconds (0: waits forever), or if the system lacks
    resources for loader processes.
    """

    def __init__(self, loader: Iterable[MicroBatch | ForgeError], workers: int, patience: float) -> None:
        self.loader, self.workers, self.patience = loader, workers, patience

    def __iter__(self) -> Iterator[MicroBatch]:
        with starting():
            source = iter(self.loader)
        while True:
            try:
                found = next(source)
            except StopIteration:
                return
            except RuntimeError as error:
                raise self._explained(error) from error
            if isinstance(found, ForgeError):
                try:
                    raise found
                finally:
                    del found  # its traceback would keep this frame alive, and with it the loader processes
            yield found

    def _explained(self, error: RuntimeError) -> Exception:
        """Returns a readable error for a DataLoader's RuntimeError."""
        if self.patience and "timed out" in str(error):
            hints = [
                "find out why the dataset waits, or raise train.hang_timeout",
                "data.workers = 0 shows where it hangs",
            ]
            words = f"no micro-batch came from {self.workers} loader processes for {self.patience:.0f} s"
            words += " (train.hang_timeout)"
            return SetupError(words, hints=hints)
        if lacks_resources(error):
            return explained(error, "this process lost the connection to its loader processes")
        return error


class _Requests(Iterable[Request]):
    """Sampler of requests, which can be iterated again for every evaluation."""

    def __init__(self, dealer: BatchAssigner, start: int, stop: int | None) -> None:
        self.bounds = (start, stop)
        self.dealer = dealer

    def __iter__(self) -> Iterator[Request]:
        return self.dealer.requests(*self.bounds)


@dataclass(frozen=True)
class Batches:
    """Micro-batches of one rank.

    Args:
        steps_per_epoch: None for a stream of unknown length
        workers: number of loader processes; 0 to fetch in this process
        prefetch: number of micro-batches that each loader process keeps ready
    """

    steps_per_epoch: int | None
    _data: Any
    _terms: AssignmentTerms
    _order: BatchSampler | None  # None for a stream of unknown length
    workers: int
    prefetch: int
    _pin: bool
    _patience: float = 0.0  # maximum seconds to wait for loader processes; 0: forever
    _reader: Reader | None = None  # None for a map-style dataset
    # Fetched by `first` and not yet used by `training`: the micro-batch, and the iterator of the next ones.
    _begun: list[tuple[MicroBatch, Iterator[MicroBatch]]] = field(default_factory=list)
    _kept: list[Iterable[MicroBatch]] = field(default_factory=list)  # loader whose processes wait for evaluations

    def fewest(self, steps: int | None) -> tuple[int, int]:
        """Returns the smallest micro-batch size on any rank, in a full step and in the last step of an epoch.

        Both are equal if a run of `steps` steps does not reach the end of an epoch, or if the end is not known.
        """
        if self._order:
            return self._dealer().fewest(steps)
        return (self._terms.share.fewest(self._terms.global_batch),) * 2

    def training(self, start: int) -> Iterator[MicroBatch]:
        """Yields the micro-batches from step `start` on, epoch after epoch, without end."""
        if self._begun and start == 0:
            micro, source = self._begun.pop()
            return chain([micro], source)
        self._begun.clear()
        return iter(self._loader(start, one_epoch=False))

    def first(self) -> MicroBatch:
        """Returns the first micro-batch of training; `training(0)` then starts with it and does not fetch it again."""
        if not self._begun:
            source = iter(self._loader(0, one_epoch=False))
            self._begun.append((next(source), source))
        return self._begun[0][0]

    def evaluation(self) -> Iterable[MicroBatch]:
        """Returns all samples once, in the given order. Keeps loader processes for the next call, except of streams."""
        if not self.workers or is_stream(self._data):
            return self._loader(0, one_epoch=True)
        if not self._kept:
            self._kept.append(self._loader(0, one_epoch=True))
        return self._kept[0]

    def _loader(self, start: int, *, one_epoch: bool) -> Iterable[MicroBatch]:
        options: dict[str, Any] = {"num_workers": self.workers, "pin_memory": self._pin, "batch_size": None}
        if self.workers:
            options |= {"prefetch_factor": self.prefetch, "persistent_workers": True}
            options |= {"worker_init_fn": leave_stopping_to_the_rank(), "timeout": self._patience}
            options["multiprocessing_context"] = reporting_context()

        if self._reader:
            stream = self._reader(self._data, self._terms, self._order, start, one_epoch)
            if self.workers:
                return self._loaded(_ToldStream(stream), options)
            return DataLoader(stream, **options)

        dealer = self._dealer()
        requests = _Requests(dealer, start, self.steps_per_epoch if one_epoch else None)
        fetcher = _Fetcher(
            self._data, self._terms.seed, once=dealer.order.once, tells_steps=not one_epoch, keys=self._terms.keys
        )
        if self.workers:
            return self._loaded(_Told(fetcher), options | {"sampler": requests})
        return _Mapped(fetcher, requests, pin=self._pin)

    def _loaded(self, data: Any, options: dict[str, Any]) -> _Loaded:
        refuse_missing_resources(self.workers, self.prefetch)
        with starting():
            return _Loaded(DataLoader(data, **options), self.workers, self._patience)

    def _dealer(self) -> BatchAssigner:
        assert self._order is not None
        return BatchAssigner(order=self._order, samples=len(self._data), terms=self._terms)


class _Mapped(Iterable[MicroBatch]):
    """Replacement for a DataLoader without loader processes, with less overhead per batch."""

    def __init__(self, fetcher: _Fetcher, requests: _Requests, *, pin: bool) -> None:
        self.fetcher, self.requests, self.pin = fetcher, requests, pin

    def __iter__(self) -> Iterator[MicroBatch]:
        micros = map(self.fetcher.__getitem__, self.requests)
        return (micro._replace(data=pinned(micro.data)) for micro in micros) if self.pin else micros


def fetch_some(data: Any, places: Iterable[int], *, seed: int, workers: int) -> Iterator[tuple[int, Any]]:
    """Yields index and batch of single samples of a map-style dataset, fetched as in training.

    With `workers` > 0, one loader process fetches.
    """
    # A dataset may open files at its first sample. They must not be open before loader processes are forked.
    requests = [Request([place], 0, 0, 1, 1, True, 0, 0) for place in places]
    fetcher = _Fetcher(data, seed, once=True, tells_steps=True)
    if not workers:
        found: Iterable[MicroBatch] = map(fetcher.__getitem__, requests)
    else:
        initializer = leave_stopping_to_the_rank()
        options: dict[str, Any] = {"worker_init_fn": initializer, "multiprocessing_context": reporting_context()}
        refuse_missing_resources(1, 2)
        with starting():
            loader = DataLoader(_Told(fetcher), sampler=requests, batch_size=None, num_workers=1, **options)
        found = _Loaded(loader, 1, 0.0)
    for request, micro in zip(requests, found, strict=False):
        yield request.ids[0], micro.data
