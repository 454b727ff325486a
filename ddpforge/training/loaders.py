"""Chooses how many loader processes serve a rank, where the recipe leaves it open."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddpforge.compat import tree_leaves
from ddpforge.cores import ranks_here, share_of_cores
from ddpforge.data import Batches
from ddpforge.data.randomness import own_random_numbers
from ddpforge.data.streams import is_stream

__all__ = ["served"]

log = logging.getLogger("ddpforge")

_HIDDEN = 0.005  # seconds that fetching a micro-batch may take: a GPU has that much work queued up
_MOST = 8  # loader processes of a rank
_SHM = Path("/dev/shm")


def served(
    key: str,
    data: Any,
    batches: Batches,
    device: torch.device,
    *,
    trains: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Batches:
    """The batches of the dataset [data.`key`], fetched by loader processes where that is safe and worth it.

    On a CPU the cores compute, and there are none. Nor are there for streams, and for data that does not say that it is
    `forkable`. Of other data the first micro-batch is timed, which is kept where a run `trains` on the batches. What is
    fetched is the same either way.
    """
    if device.type == "cpu" or is_stream(data) or not getattr(data, "forkable", False):
        return batches
    began = clock()
    with own_random_numbers():
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
    """The loader processes for which there are cores, and room for the batches, of so many bytes, that they keep ready.

    A rank itself has a core, and half of the shared memory is left to others.
    """
    ranks = ranks_here()
    free = shutil.disk_usage(_SHM).free if _SHM.is_dir() else 0
    return max(0, min(_MOST, share_of_cores(ranks) - 1, free // 2 // (ranks * prefetch * max(1, batch))))
