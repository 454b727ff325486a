"""Opens the data of a rank, and chooses its number of loader processes for `data.workers = "auto"`."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddpforge.compat import tree_leaves
from ddpforge.data import Batches, RankShare
from ddpforge.data.batch_assignment import AssignmentTerms, Divider
from ddpforge.data.collating import WHOLE_BATCH, BatchKeys
from ddpforge.data.fetching import Reader, is_stream
from ddpforge.data.rng import isolated_rng
from ddpforge.data.workers import refuse_missing_resources
from ddpforge.errors import PluginError
from ddpforge.interfaces import BatchSampler, Sequential, device_kind
from ddpforge.local_world import cores_per_rank, local_world_size
from ddpforge.machine import available_memory, shared_memory_folder
from ddpforge.training.features import feature_classes, only_one

__all__ = ["check_data", "open_data", "served"]

log = logging.getLogger("ddpforge")

_HIDDEN = 0.005  # seconds to fetch a micro-batch that cost no time: a GPU has more work than that in its queue
_MOST = 8  # loader processes of a rank, at most


def check_data(data: Any) -> Reader | None:
    """Returns the reader of `data`, None for a map-style dataset; raises PluginError for other or empty data."""
    reader: Reader | None = only_one(feature_classes(), "reader", data)
    if not reader and not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise PluginError(
            f"{type(data).__name__} is not a dataset: it has neither __len__ and __getitem__ nor __iter__",
            hints=["see `ddpforge.interfaces.Data` for the methods of a dataset"],
        )
    try:
        is_empty = hasattr(data, "__len__") and len(data) == 0
    except TypeError as error:
        raise PluginError(f"{type(data).__name__}.__len__ must return a whole number: {error}") from error
    if is_empty:
        raise PluginError(f"{type(data).__name__} is empty: it has no samples")
    return reader


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
    keys: BatchKeys = WHOLE_BATCH,
    limit: Divider | None = None,
) -> Batches:
    """Opens `data` (see `interfaces.Data`) for this rank; without `order`, in dataset order.

    `limit` divides the samples of each step, not for streams.

    Raises:
        PluginError: `data` is not a dataset (see `check_data`), or has fewer samples than one global batch
        SetupError: this machine lacks resources for loader processes
    """
    reader = check_data(data)
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
    return Batches(steps, data, terms, order, workers, prefetch, pin, patience, reader)


def served(
    key: str,
    data: Any,
    batches: Batches,
    device: torch.device,
    *,
    trains: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Batches:
    """Returns the batches of the dataset [data.`key`], with loader processes if these are safe and save time.

    There are none on a CPU (its cores compute), for streams, and for data without `forkable = True`. For other data,
    the first micro-batch is timed; a run that `trains` on the batches keeps it. Samples do not depend on this choice.
    """
    if device_kind(device).is_host or is_stream(data) or not getattr(data, "forkable", False):
        return batches
    began = clock()
    with isolated_rng():
        micro = batches.first() if trains else next(iter(batches.evaluation()))
    took = clock() - began
    if took <= _HIDDEN:
        return batches
    workers = _most(sum(one.nbytes for one in tree_leaves(micro.data) if isinstance(one, Tensor)), batches.prefetch)
    log.info(
        '[data.%s]: fetching a micro-batch takes %.0f ms; data.workers = "auto" is %d here', key, 1000 * took, workers
    )
    return replace(batches, workers=workers, _begun=[]) if workers else batches


def _most(batch: int, prefetch: int) -> int:
    """Returns the number of loader processes that cores and shared memory allow, for batches of `batch` bytes.

    A core is kept for the rank itself, and half of the shared memory for others.
    """
    ranks = local_world_size()
    place = shared_memory_folder()
    free = shutil.disk_usage(place).free if place else available_memory()
    return max(0, min(_MOST, cores_per_rank(ranks) - 1, free // 2 // (ranks * prefetch * max(1, batch))))
