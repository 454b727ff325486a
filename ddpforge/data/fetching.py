"""Fetches samples, in this process or in loader processes, one micro-batch at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from numbers import Integral
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ddpforge.data.batch_assignment import AssignmentTerms, BatchAssigner, Divider, MicroBatch, RankShare, Request
from ddpforge.data.collating import BatchKeys, collate_of
from ddpforge.data.pytree import pinned
from ddpforge.data.rng import seed_all
from ddpforge.data.shard_reader import ShardedStream
from ddpforge.data.sources import JoinedSources, ShardedSources, Sources
from ddpforge.data.streams import Stream, is_stream, loader_in
from ddpforge.data.workers import explained, lacks_resources, refuse_missing_resources, reporting_context, starting
from ddpforge.errors import ForgeError, PluginError, SetupError
from ddpforge.interfaces import BatchSampler, Sequential, ShardedDataset, SourceSampler, mix
from ddpforge.ranks.signals import leave_stopping_to_the_rank

__all__ = ["Batches", "check_data", "fetch_some", "open_data"]


_WHOLE_BATCH = BatchKeys()


class _Fetcher(Dataset[MicroBatch]):
    """Dataset with whole micro-batches as items; runs in the training process or in a loader process.

    Calls `set_epoch` of the inner dataset before the first sample of each epoch. With `tells_steps` (in training), also
    calls `set_step` before the first sample of each step.
    """

    def __init__(self, data: Any, seed: int, *, once: bool, tells_steps: bool, keys: BatchKeys = _WHOLE_BATCH) -> None:
        self.data = data
        self.seed = seed
        self.random: bool = getattr(data, "random", True)
        self.once = once
        self.batched = hasattr(data, "__getitems__")
        self.collate = collate_of(data, keys)
        self._set_epoch = getattr(data, "set_epoch", None)
        self._set_step = getattr(data, "set_step", None) if tells_steps else None
        self._tells_places = not tells_steps
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
        sources = self.data.source_of(request.ids).tolist() if isinstance(self.data, Sources) else None
        batch = self.collate(fetched)
        return MicroBatch(batch, samples, step_samples, last, shard, number, places=places, sources=sources)

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

    @property
    def source_names(self) -> Sequence[str]:
        """Returns the names of the sources; empty for data that is a single source."""
        return self._data.names if isinstance(self._data, JoinedSources) else ()

    @property
    def shares_of_sources(self) -> dict[str, float]:
        """Returns the shares of the sources in the first steps, by name; empty for data that is a single source."""
        if not isinstance(self._order, SourceSampler):
            return {}
        return dict(zip(self.source_names, self._order.shares(), strict=True))

    def epochs_of_sources(self, steps: int) -> dict[str, float]:
        """Returns how often the first `steps` steps of training go through each source, by name."""
        if not isinstance(self._order, SourceSampler):
            return {}
        return dict(zip(self.source_names, self._order.epochs_of_sources(steps), strict=True))

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

        in_parts = isinstance(self._data, ShardedDataset | ShardedSources)
        if in_parts or is_stream(self._data):
            stream = (
                ShardedStream(self._data, self._terms, start, one_epoch, self._order)
                if in_parts
                else Stream(self._data, self._terms, start, one_epoch)
            )
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


def open_data(
    data: Any,
    *,
    order: BatchSampler | None = None,
    global_batch: int,
    share: RankShare,
    seed: int,
    drop_last: bool,
    workers: int,
    prefetch: int,
    pin: bool,
    patience: float = 0.0,
    keys: BatchKeys = _WHOLE_BATCH,
    limit: Divider | None = None,
) -> Batches:
    """Opens `data` (see `interfaces.Data`) for this rank; without `order`, in dataset order.

    `limit` divides the samples of each step, not for streams.

    Raises:
        PluginError: `data` is no dataset (see `check_data`), or has fewer samples than one global batch
        SetupError: this machine lacks resources for loader processes
    """
    check_data(data)
    if workers:
        refuse_missing_resources(workers, prefetch)
    if order is None and hasattr(data, "__len__"):
        order = Sequential(data, global_batch, drop_last)
    steps = order.steps_per_epoch if order else None
    if steps == 0:
        samples = len(data)
        raise PluginError(
            f"{type(data).__name__} has {samples} sample{'s' * (samples != 1)}, fewer than one global batch of "
            f"{global_batch}",
            hints=["lower train.global_batch, or set train.drop_last = false"],
        )
    terms = AssignmentTerms(
        global_batch=global_batch, share=share, seed=seed, drop_last=drop_last, keys=keys, limit=limit
    )
    return Batches(steps, data, terms, order, workers, prefetch, pin, patience)


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


def check_data(data: Any) -> None:
    """Raises PluginError if `data` is not a dataset, or has no samples."""
    if is_stream(data) and (loader := loader_in(data)) is not None:
        inside = "" if loader is data else f", which {type(data).__name__} reads,"
        raise PluginError(
            f"a {type(loader).__name__}{inside} is a loader, not a dataset: it would choose batches and order itself, "
            "the same in every epoch",
            hints=["give the dataset that the loader reads; set batches, order and workers in the recipe"],
        )
    if not is_stream(data) and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise PluginError(
            f"{type(data).__name__} is not a dataset: it has neither __len__ and __getitem__ nor __iter__",
            hints=["see `ddpforge.interfaces.Data` for the methods of a dataset"],
        )
    if isinstance(data, ShardedDataset):
        _check_parts(data)
    if hasattr(data, "__len__") and len(data) == 0:
        raise PluginError(f"{type(data).__name__} is empty: it has no samples")


def _check_parts(data: ShardedDataset) -> None:
    name = type(data).__name__
    if not _whole_numbers(getattr(data, "shard_sizes", None), least=0):
        raise PluginError(f"{name}.shard_sizes must hold the number of samples of each part: whole numbers, at least 0")
    if not _whole_numbers(data.interleave, least=1) or len(data.interleave) != 2:
        raise PluginError(f"{name}.interleave must be two whole numbers of at least 1, not {data.interleave}")
    if not _whole_numbers([data.shuffle_buffer], least=1):
        raise PluginError(f"{name}.shuffle_buffer must be at least 1, not {data.shuffle_buffer}")


def _whole_numbers(found: Any, *, least: int) -> bool:
    return isinstance(found, Iterable) and all(isinstance(one, Integral) and int(one) >= least for one in found)
