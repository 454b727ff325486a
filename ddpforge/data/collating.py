"""Collates samples to batches, with the dataset's `collate` or torch's default."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import default_collate

from ddpforge.data.workers import explained, lacks_resources
from ddpforge.errors import PluginError

__all__ = ["collate_of"]


def collate_of(data: Any) -> Callable[[Sequence[Any]], Any]:
    """Returns the dataset's `collate`, or torch's `default_collate` with an error that names the dataset."""
    return getattr(data, "collate", None) or partial(_stacked, type(data).__name__)


def _stacked(name: str, samples: Sequence[Any]) -> Any:
    try:
        return default_collate(list(samples))
    except (RuntimeError, TypeError) as error:
        if lacks_resources(error):  # in a loader process, batches are made in shared memory
            raise explained(error, "a loader process could not make a micro-batch") from error
        raise PluginError(
            f"the samples of {name} cannot be stacked to a batch: {error}",
            hints=["give samples of one form, or give the dataset a method `collate(samples)` that pads them"],
        ) from error
