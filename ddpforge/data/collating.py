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
            hints=_ways(str(error), samples),
        ) from error


def _ways(error: str, samples: Sequence[Any]) -> list[str]:
    """Returns hints for samples that torch cannot stack."""
    if any(sample is None for sample in samples):
        return ["`__getitem__` returned None: does it end with `return`?"]
    if "NoneType" in error:
        return ["a part of a sample is None: return a tensor or a number instead, or leave the part out"]
    if "PIL" in error:
        return ["turn images into tensors, e.g. with torchvision.transforms.v2.functional.pil_to_tensor(image)"]
    return ["give samples of one form, or give the dataset a method `collate(samples)` that pads them"]
