"""Chooses the number of loader processes of a rank for `data.workers = "auto"`."""

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
from ddpforge.data import Batches
from ddpforge.data.rng import isolated_rng
from ddpforge.data.streams import is_stream
from ddpforge.interfaces import device_kind
from ddpforge.local_world import cores_per_rank, local_world_size
from ddpforge.machine import available_memory, shared_memory_folder

__all__ = ["served"]

log = logging.getLogger("ddpforge")

_HIDDEN = 0.005  # seconds to fetch a micro-batch that cost no time: a GPU has more work than that in its queue
_MOST = 8  # loader processes of a rank, at most


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
